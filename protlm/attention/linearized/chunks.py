"""Features and values of the chunks of a tile, for causal linear attention.

The logits of exponential features need a reference that does not depend on later keys. Each chunk
has one for each feature: the logit of an unpadded key before the chunk, or of the first key for the
first chunk. At the end of a chunk it is raised only where a key of the chunk has a logit more than
`largest_rise` above it; the state is then rescaled. Thus key features are at most 2⁶⁴ in float32,
where the sum of weights of a row is still finite, and terms that matter do not underflow.

Within a chunk, the rows from the first such key on are computed directly: each weight is a sum over
the features of 2^(query logit + key logit - maximum of the row), without a matrix product. Which
rows these are does not depend on later keys; all others are rounded as if there were no such key.

Tensors without a suffix are (B, H, chunks, 64, width), states (B, H, chunks, C + 1, R).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from protlm.attention.linearized import direct
from protlm.attention.linearized.features import (
    ExponentialFeatureMap,
    Pullback,
    exponential,
    logit_floor,
)
from protlm.attention.linearized.operands import Kernel, Operands
from protlm.attention.ops.products import matrix_product
from protlm.attention.ops.tiles import CHUNK, Tile


class Rises(NamedTuple):
    """Additional tensors of a tile in which references rise.

    Attributes:
        phi_k_after: features of the keys, relative to the reference after their chunk.
        factors: of the state, 2^(reference before - reference after), (B, H, chunks, 1, R).
        is_direct: true for rows that are computed directly, (B, H, chunks, 64, 1).
        weights: of those rows, (B, H, chunks, 64, 64).
        query_logits: logits of the queries minus the maximum of the row.
        key_logits: logits of the keys.
    """

    phi_k_after: Tensor
    factors: Tensor
    is_direct: Tensor
    weights: Tensor
    query_logits: Tensor
    key_logits: Tensor


class Chunks(NamedTuple):
    """Features and [v | 1] of the chunks of a tile.

    Attributes:
        phi_q: features of the queries.
        phi_k: features of the keys, relative to the reference before their chunk.
        values: [v | 1].
        query_pullback: of φ(q); where there are rises, of ln φ(q).
        key_pullback: of φ(k), or of ln φ(k), likewise.
        reference: the reference after the tile, (B, H, 1, R); None for features without one.
        rises: None where no reference rises.
        dtype: what operands of products are rounded to, if anything.
    """

    phi_q: Tensor
    phi_k: Tensor
    values: Tensor
    query_pullback: Pullback
    key_pullback: Pullback
    reference: Tensor | None = None
    rises: Rises | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def of(
        cls,
        operands: Operands,
        kernel: Kernel,
        tile: Tile,
        reference: Tensor | None,
        *,
        has_rises: bool | None = None,
    ) -> "Chunks":
        """Computes the features, relative to the reference before the tile, if any.

        Args:
            operands: queries, keys and values.
            kernel: the feature map.
            tile: the chunks.
            reference: the reference before the tile.
            has_rises: whether `rises` was not None in the forward pass, for a backward pass.
        """
        values = chunked(operands.values_and_ones(tile))
        feature_map = kernel.feature_map
        if isinstance(feature_map, ExponentialFeatureMap):
            return cls._exponential(operands, feature_map, tile, reference, values, has_rises)
        phi_q, query_pullback = feature_map.queries(operands.queries(tile))
        phi_k, key_pullback = feature_map.keys(operands.keys(tile))
        return cls(
            chunked(phi_q),
            chunked(phi_k),
            values,
            query_pullback,
            key_pullback,
            dtype=operands.product_dtype,
        )

    @classmethod
    def _exponential(
        cls,
        operands: Operands,
        feature_map: ExponentialFeatureMap,
        tile: Tile,
        reference: Tensor | None,
        values: Tensor,
        has_rises: bool | None,
    ) -> "Chunks":
        logits, key_pullback = feature_map.key_logits(operands.keys(tile))
        reference = _first_reference(operands, tile, logits, reference)
        floor = logit_floor(logits.dtype)
        operands.clear_padding(logits.sub_(reference), tile, value=floor)
        queries = operands.queries(tile)
        if may_rise(logits) if has_rises is None else has_rises:
            query_logits, query_pullback = feature_map.query_logits(queries, reference)
            query_logits, key_logits = chunked(query_logits), chunked(logits, value=floor)
            phi_q, phi_k, rises, rise = _with_rises(query_logits, key_logits)
            reference = reference + rise
        else:
            phi_q, query_pullback = feature_map.queries(queries, reference)
            phi_k, key_pullback = exponential(logits, key_pullback)
            phi_q, phi_k, rises = chunked(phi_q), chunked(phi_k), None
        pullbacks, dtype = (query_pullback, key_pullback), operands.product_dtype
        return cls(phi_q, phi_k, values, *pullbacks, reference, rises, dtype)

    def state_keys(self) -> Tensor:
        """Returns the features of the keys, relative to the reference after their chunk."""
        return self.phi_k if self.rises is None else self.rises.phi_k_after

    def factors(self) -> Tensor | None:
        """Returns the factors of the state at the end of each chunk; None for 1."""
        return None if self.rises is None else self.rises.factors

    def product(self, x: Tensor, y: Tensor, *, onto: Tensor | None = None) -> Tensor:
        """Computes x y for each chunk; adds it to `onto`, in place, if given."""
        return matrix_product(x, y, onto=onto, dtype=self.dtype)

    def weights(self) -> Tensor:
        """Computes the unnormalized weights within each chunk."""
        weights = self.product(self.phi_q, self.phi_k.mT).tril_()
        if self.rises is None:
            return weights
        return torch.where(self.rises.is_direct, self.rises.weights, weights)

    def feature_gradients(
        self, dweights: Tensor, dphi_q: Tensor, dphi_k: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes the arguments of the pullbacks.

        Args:
            dweights: gradient of the weights within each chunk.
            dphi_q: gradient of φ(q) through the states.
            dphi_k: gradient of `state_keys` through the states.
        """
        if self.rises is None:
            dphi_q = self.product(dweights, self.phi_k, onto=dphi_q)
            return dphi_q, self.product(dweights.mT, self.phi_q, onto=dphi_k)
        rises = self.rises
        fast = dweights.masked_fill(rises.is_direct, 0)
        apart = dphi_k * rises.phi_k_after
        apart += self.product(fast.mT, self.phi_q) * self.phi_k
        # Where nothing rises, both features are equal, and the sum is rounded as without rises.
        together = self.product(fast.mT, self.phi_q, onto=dphi_k) * self.phi_k
        dlog_k = torch.where(rises.factors == 1, together, apart)
        dlog_q = self.product(fast, self.phi_k, onto=dphi_q) * self.phi_q
        dquery, dkey = direct.gradients(
            rises.query_logits, rises.key_logits, rises.is_direct, dweights
        )
        return dlog_q.add_(dquery), dlog_k.add_(dkey)


def may_rise(logits: Tensor) -> bool:
    """Returns whether a logit may be too large for its reference; a GPU is waited for."""
    # The comparison is false for NaN, so that rows before a NaN are still computed directly.
    return is_compiling() or not bool(logits.amax() <= largest_rise(logits.dtype))


def _first_reference(
    operands: Operands, tile: Tile, logits: Tensor, reference: Tensor | None
) -> Tensor:
    """Returns the reference of the first chunk of a tile."""
    if reference is not None and not operands.may_have_padding:
        return reference
    floor = logit_floor(logits.dtype)
    first_B111, has_key_B111 = operands.first_keys(tile)
    batch, heads, _, num_features = logits.shape
    first = logits.gather(2, first_B111.expand(batch, heads, 1, num_features))
    first = first.masked_fill(~has_key_B111, floor)
    if reference is None:
        return first
    # A sample may have had only padding so far.
    return torch.where(reference == floor, first, reference)


def _with_rises(query_logits: Tensor, key_logits: Tensor) -> tuple[Tensor, Tensor, Rises, Tensor]:
    """Returns φ(q), φ(k), further tensors, and the rise of the whole tile, (B, H, 1, R).

    The logits are (B, H, chunks, 64, R), relative to the reference before the tile.
    """
    largest = largest_rise(key_logits.dtype)
    references = direct.running_references(key_logits.amax(dim=3), largest)[:, :, :, None]
    before, after = references[:, :, :-1], references[:, :, 1:]
    relative = key_logits - before
    is_above = relative.amax(dim=-1, keepdim=True) > largest
    is_direct = is_above.int().cumsum(dim=3) > 0
    shifted = query_logits + before
    maxima, weights = direct.rows(query_logits, key_logits, before, is_direct)
    maxima = torch.where(is_direct, maxima, shifted.amax(dim=-1, keepdim=True))
    rises = Rises(
        phi_k_after=(key_logits - after).exp2_(),
        factors=(before - after).exp2_(),
        is_direct=is_direct,
        weights=weights,
        query_logits=query_logits - maxima,
        key_logits=key_logits,
    )
    phi_k = relative.clamp_(max=largest).exp2_()
    return shifted.sub_(maxima).exp2_(), phi_k, rises, references[:, :, -1]


def largest_rise(dtype: torch.dtype) -> float:
    """Returns the largest logit relative to its reference: half the exponent range of the dtype."""
    return math.log2(torch.finfo(dtype).max) / 2


def chunked(x_BHLR: Tensor, *, value: float = 0) -> Tensor:
    """Splits positions into chunks; the last one is padded with `value`."""
    missing = -x_BHLR.shape[2] % CHUNK
    padded = F.pad(x_BHLR, (0, 0, 0, missing), value=value) if missing else x_BHLR
    return padded.unflatten(2, (-1, CHUNK))


def positions(chunks: Tensor, tile: Tile) -> Tensor:
    """Inverts `chunked`."""
    return chunks.flatten(2, 3)[:, :, : tile.rows.stop - tile.rows.start]
