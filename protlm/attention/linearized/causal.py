"""Causal linear attention in chunks: O_i = φ(q_i) Σ_{j≤i} φ(k_j)ᵀ[v_j | 1] (2009.14794, B.1).

Within a chunk of 64 positions the weights are a masked 64×64 product; between chunks, prefix sums
of [v | 1]ᵀφ(k), the states. A tile of chunks is computed at a time. Only the state before each
tile is kept; features and the states within a tile are recomputed in the backward pass. Nothing is
ever subtracted from a state, so that later positions do not affect earlier ones, not even by
rounding. The exceptions are NaN and infinities, which affect their whole chunk, since 0·NaN is NaN.

Tensors without a suffix are (B, H, chunks, 64, width), states (B, H, chunks, C + 1, R).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.linearized.chunks import States, chunked, positions
from protlm.attention.linearized.features import FeatureMap
from protlm.attention.linearized.normalization import Normalizer
from protlm.attention.linearized.operands import Operands, empty_output
from protlm.attention.linearized.tile_features import TileFeatures
from protlm.attention.ops.numerics import no_autocast
from protlm.attention.ops.products import matrix_product
from protlm.attention.ops.tiles import tiles

# The state of a chunk, its gradient and their increments are as large as its features.
_MEMORY_DIVISOR = 2


class CausalAttention(torch.autograd.Function):
    """`apply(q, k, v, mask, feature map, normalizer)` returns the output, BHLC, like v."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        mask_BL: Tensor,
        feature_map: FeatureMap,
        normalizer: Normalizer,
    ) -> Tensor:
        """Computes the tiles from left to right, carrying the state."""
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL)
        dtype = operands.product_dtype
        out_BHLC = empty_output(v_BHLC)
        saved_BHL1 = torch.empty_like(v_BHLC[..., :1], dtype=operands.dtype)
        states: list[Tensor] = []
        references: list[Tensor | None] = []
        num_features = feature_map.num_features(q_BHLK.shape[-1])
        groups = list(tiles(q_BHLK, num_features=num_features, memory_divisor=_MEMORY_DIVISOR))
        with no_autocast(v_BHLC):
            for group in groups:
                features, prefix = TileFeatures(operands, feature_map), States()
                for tile in group:
                    if prefix.last is not None:
                        # The next tile overwrites it.
                        states.append(prefix.last.clone())
                    phi_k = chunked(features.keys(tile, causal=True).phi_BHLR)
                    phi_q = chunked(features.queries(tile).phi_BHLR)
                    values = chunked(operands.values_and_ones(tile))
                    before = prefix.add_products(values.mT, phi_k, dtype=dtype)
                    weights = matrix_product(phi_q, phi_k.mT, dtype=dtype).tril_()
                    sums = matrix_product(phi_q, before.mT, dtype=dtype)
                    sums = matrix_product(weights, values, onto=sums, dtype=dtype)
                    normalized = normalizer(positions(sums, tile))
                    tile.of(out_BHLC)[:], tile.of(saved_BHL1)[:] = normalized
                    operands.clear_padding(tile.of(out_BHLC), tile)
                references.append(features.reference_BH1R)
        ctx.settings = feature_map, normalizer, groups
        # The projection is saved so that a redraw before the backward pass is an error.
        inputs = q_BHLK, k_BHLK, v_BHLC, mask_BL, feature_map.projection_RK
        ctx.save_for_backward(*inputs, out_BHLC, saved_BHL1, *references, *states)
        return out_BHLC

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Computes the tiles from right to left, carrying the gradient of the state."""
        (dout_BHLC,) = grad_outputs
        # Accessed once: activation checkpointing does not allow a second access.
        q_BHLK, k_BHLK, v_BHLC, mask_BL, _, out_BHLC, saved_BHL1, *rest = ctx.saved_tensors
        feature_map, normalizer, groups = ctx.settings
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL)
        references, states = rest[: len(groups)], rest[len(groups) :]
        dq_BHLK, dk_BHLK, dv_BHLC = (torch.empty_like(x) for x in (q_BHLK, k_BHLK, v_BHLC))
        with no_autocast(out_BHLC):
            for group, reference in zip(reversed(groups), reversed(references), strict=True):
                features = TileFeatures(operands, feature_map, reference)
                prefix, suffix = States(), States(reverse=True)
                for tile in reversed(group):
                    prefix.last = states.pop() if tile is not group[0] else None
                    dsums = normalizer.gradient(
                        tile.of(dout_BHLC),
                        tile.of(out_BHLC).to(operands.dtype),
                        tile.of(saved_BHL1),
                    )
                    operands.clear_padding(dsums, tile)
                    phi_k, key_pullback = features.keys(tile, causal=True)
                    phi_q, query_pullback = features.queries(tile)
                    values = operands.values_and_ones(tile)
                    dtype = operands.product_dtype
                    gradients = _gradients(phi_q, phi_k, values, dsums, prefix, suffix, dtype)
                    dphi_q, dphi_k, dvalues = (positions(g, tile) for g in gradients)
                    tile.of(dq_BHLK)[:] = query_pullback(dphi_q)
                    tile.of(dk_BHLK)[:] = key_pullback(dphi_k)
                    tile.of(dv_BHLC)[:] = dvalues[..., :-1]
                    operands.clear_padding(tile.of(dv_BHLC), tile)
        return dq_BHLK, dk_BHLK, dv_BHLC, None, None, None


def _gradients(
    phi_q: Tensor,
    phi_k: Tensor,
    values: Tensor,
    dsums: Tensor,
    prefix: States,
    suffix: States,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of φ(q), φ(k) and [v | 1], in chunks."""
    phi_q, phi_k, values, dsums = (chunked(x) for x in (phi_q, phi_k, values, dsums))
    multiply = partial(matrix_product, dtype=dtype)
    before = prefix.add_products(values.mT, phi_k, dtype=dtype)
    dafter = suffix.add_products(dsums.mT, phi_q, dtype=dtype)
    weights = multiply(phi_q, phi_k.mT).tril_()
    dweights = multiply(dsums, values.mT).tril_()
    dphi_q = multiply(dweights, phi_k, onto=multiply(dsums, before))
    dphi_k = multiply(dweights.mT, phi_q, onto=multiply(values, dafter))
    dvalues = multiply(weights.mT, dsums, onto=multiply(phi_k, dafter.mT))
    return dphi_q, dphi_k, dvalues
