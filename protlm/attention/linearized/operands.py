"""What linear attention multiplies, a tile at a time: features of queries and keys, and [v | 1].

Features that are exponentials are relative to a reference. In bidirectional attention it is, for
each feature, the largest logit of all unpadded keys of the sequence. It is updated while the state
is summed, and the state is then rescaled, as in flash attention (Milakov and Gimelshein, arXiv
1805.02867).

In causal attention it must not depend on later keys: it is the logit of the first unpadded key,
which every query sees. Logits are cut at `largest_rise` above it, so that sums of features are
finite. Keys of trained models are not cut (docs/decisions/0019); a cut one has too little weight.
"""

import math
import warnings
from functools import partial

import torch
from torch import Tensor
from torch.compiler import is_compiling

from protlm.attention.linearized.features import FeatureMap, Features
from protlm.attention.linearized.positive import ExponentialFeatureMap, exponential, logit_floor
from protlm.attention.linearized.tiles import Tile
from protlm.attention.ops.numerics import accum_dtype
from protlm.attention.ops.products import may_round_on_cpu, operand_dtype, product


def rounds_on_cpu(feature_map: FeatureMap, q_BHLK: Tensor, v_BHLC: Tensor) -> bool:
    """Returns whether operands of products are rounded on a CPU."""
    # Sums of other weights than positive ones cancel.
    is_rounded = accum_dtype(q_BHLK) == torch.float32 and feature_map.has_fused
    return is_rounded and may_round_on_cpu(v_BHLC)


class Operands:
    """Queries, keys and values with their mask and feature map.

    Its methods return contiguous tensors in `dtype`: float32, or float64 for float64 queries.
    Operands of products of features, states and values are rounded to `product_dtype`. With
    `rounds_on_cpu` they are on a CPU, too: values, and features without a projection, are then
    `value_dtype`, bfloat16. Features that are exponentials, half of the time, are kept for the
    backward pass there, if `keeps` stays true; that pass sets `kept`, from which they are taken.
    `reference_BH1R` is that of the group of tiles at hand; None before its first keys, and for
    features without one.
    """

    def __init__(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        mask_BL: Tensor,
        feature_map: FeatureMap,
        *,
        rounds_on_cpu: bool = False,
    ) -> None:
        assert mask_BL.dtype == torch.bool, f"the mask must be bool, not {mask_BL.dtype}"
        self._q_BHLK, self._k_BHLK, self._v_BHLC = q_BHLK, k_BHLK, v_BHLC
        self._mask_BL, self._feature_map = mask_BL, feature_map
        # On a CPU it is cheaper to look for padding than to clear it. On a GPU, looking would
        # synchronize, and under torch.compile it would break the graph.
        may_look = mask_BL.device.type == "cpu" and not is_compiling()
        self._is_whole = may_look and bool(mask_BL.all())
        self.dtype = accum_dtype(q_BHLK)
        self.rounds_on_cpu = rounds_on_cpu
        # On a CPU, what is rounded anyway is not cast to float32 before.
        self.value_dtype = v_BHLC.dtype if self.rounds_on_cpu else self.dtype
        self.product_dtype = self.value_dtype if self.rounds_on_cpu else operand_dtype(v_BHLC)
        is_projected = feature_map.projection_RK is not None
        self._vector_dtype = self.dtype if is_projected else self.value_dtype
        self.keeps = self.rounds_on_cpu and isinstance(feature_map, ExponentialFeatureMap)
        self._kept_keys: list[Tensor] = []
        self._kept_queries: list[Tensor] = []
        self.kept: list[Tensor] | None = None
        self.reference_BH1R: Tensor | None = None

    def queries(self, tile: Tile) -> Features:
        """Computes the features of queries, after the keys that they see."""
        feature_map = self._feature_map
        if self.kept is not None and isinstance(feature_map, ExponentialFeatureMap):
            return exponential(self.kept.pop(), feature_map.query_pullback)
        phi, pullback = feature_map.queries(self._take(self._q_BHLK, tile), self.reference_BH1R)
        return Features(self._keep(phi, self._kept_queries), pullback)

    def keys(self, tile: Tile, *, causal: bool = False) -> Features:
        """Computes the features of keys: if not causal, after all keys were added."""
        feature_map = self._feature_map
        if not isinstance(feature_map, ExponentialFeatureMap):
            return feature_map.keys(self._take(self._k_BHLK, tile))
        k_BHMK = self._take(self._k_BHLK, tile)
        pullback = partial(feature_map.key_pullback, k_BHLK=k_BHMK)
        if self.kept is not None:
            return exponential(self.kept.pop(), pullback)
        logits = self._logits(feature_map, k_BHMK, tile)
        if causal:
            self.reference_BH1R = self._first_reference(logits, tile)
        assert self.reference_BH1R is not None
        logits.sub_(self.reference_BH1R)
        phi = (_cut(logits) if causal else logits).exp2_()
        return exponential(self._keep(phi, self._kept_keys) if causal else phi, pullback)

    def relative(self, dstate: Tensor) -> Tensor:
        """Returns the gradient of the state in units of the features of keys that were just taken.

        Kept ones are relative to the reference when their tile was added, and not to the last one.
        """
        if self.kept is None or self.reference_BH1R is None:
            return dstate
        return dstate * (self.kept.pop() - self.reference_BH1R).exp2_()

    def kept_for_backward(self) -> list[Tensor]:
        """Returns what was kept since the last call, in reverse: keys, and then queries.

        The backward pass takes it from the end: queries first, from the first tile on.
        """
        kept = [*reversed(self._kept_keys), *reversed(self._kept_queries)]
        self._kept_keys, self._kept_queries = [], []
        return kept

    def _keep(self, phi: Tensor, kept: list[Tensor]) -> Tensor:
        if self.keeps:
            phi = phi.to(self.value_dtype)
            kept.append(phi)
        return phi

    def raise_reference(self, tile: Tile) -> None:
        """Raises the reference to the largest logits of a tile, where features have one."""
        if isinstance(self._feature_map, ExponentialFeatureMap):
            k_BHMK = self._take(self._k_BHLK, tile)
            highest = self._logits(self._feature_map, k_BHMK, tile).amax(dim=-2, keepdim=True)
            reference = self.reference_BH1R
            self.reference_BH1R = highest if reference is None else highest.maximum(reference)

    def add_keys(self, state: Tensor | None, tile: Tile) -> Tensor:
        """Adds [v | 1]ᵀφ(k) of a tile to the state, (B, H, C + 1, R), in place."""
        feature_map = self._feature_map
        if isinstance(feature_map, ExponentialFeatureMap):
            logits = self._logits(feature_map, self._take(self._k_BHLK, tile), tile)
            highest = logits.amax(dim=-2, keepdim=True)
            if state is not None and self.reference_BH1R is not None:
                highest = torch.maximum(highest, self.reference_BH1R)
                state.mul_((self.reference_BH1R - highest).exp2_())
            self.reference_BH1R = highest
            phi = self._keep(logits.sub_(highest).exp2_(), self._kept_keys)
            if self.keeps:
                self._kept_keys.append(highest)
        else:
            phi = feature_map.keys(self._take(self._k_BHLK, tile)).phi_BHLR
        if self.rounds_on_cpu:
            values = self.values_and_ones(tile).mT
        else:
            # Contiguous, since a product over positions would copy it anyway.
            values = self._with_ones(tile, transposed=True)
            self.clear_padding(values.mT, tile)
        increment = product(values, phi.mT, dtype=self.product_dtype)
        return increment.to(self.dtype) if state is None else state.add_(increment)

    def values(self, tile: Tile) -> Tensor:
        return self._take(self._v_BHLC, tile, dtype=self.value_dtype)

    def values_and_ones(self, tile: Tile) -> Tensor:
        """Returns [v | 1], and [0 | 0] at padding; the column of ones yields the sum of weights."""
        return self.clear_padding(self._with_ones(tile, transposed=False), tile)

    def clear_padding(self, x_BHMK: Tensor, tile: Tile, *, value: float = 0) -> Tensor:
        """Sets the padding of a tile to 0 or another value, in place."""
        if self._is_whole:
            return x_BHMK
        padding_BM = ~self._mask_BL[tile.samples, tile.rows]
        if padding_BM.device.type == "cpu" and not is_compiling() and len(padding_BM) == 1:
            # Only writes to the padding, which is a small part. A GPU would have to synchronize.
            return x_BHMK.index_fill_(2, padding_BM[0].nonzero()[:, 0], value)
        return x_BHMK.masked_fill_(padding_BM[:, None, :, None], value)

    def _take(self, x: Tensor, tile: Tile, *, dtype: torch.dtype | None = None) -> Tensor:
        x_BHMK, dtype = tile.of(x), dtype or self._vector_dtype
        if self._is_whole:
            return x_BHMK.to(dtype).contiguous()
        copy_BHMK = x_BHMK.new_empty(x_BHMK.shape, dtype=dtype).copy_(x_BHMK)
        return self.clear_padding(copy_BHMK, tile)

    def _with_ones(self, tile: Tile, *, transposed: bool) -> Tensor:
        v_BHMC = tile.of(self._v_BHLC)
        *leading, rows, width = v_BHMC.shape
        shape = (width + 1, rows) if transposed else (rows, width + 1)
        values = v_BHMC.new_empty(*leading, *shape, dtype=self.value_dtype)
        by_rows = values.mT if transposed else values
        # Casting and transposing in one copy is several times slower on a CPU.
        by_rows[..., :-1] = v_BHMC.to(self.value_dtype) if transposed else v_BHMC
        by_rows[..., -1] = 1
        return values

    def _logits(self, feature_map: ExponentialFeatureMap, k_BHMK: Tensor, tile: Tile) -> Tensor:
        logits = feature_map.key_logits(k_BHMK)
        return self.clear_padding(logits, tile, value=logit_floor(logits.dtype))

    def _first_reference(self, logits: Tensor, tile: Tile) -> Tensor:
        """Returns the logits of the first keys; the floor for a sample of padding so far."""
        reference_BH1R = self.reference_BH1R
        if reference_BH1R is not None and self._is_whole:
            return reference_BH1R
        first_BH1R = _first_of(logits, self._mask_BL[tile.samples, tile.rows])
        if reference_BH1R is None:
            return first_BH1R
        is_padding = reference_BH1R == logit_floor(logits.dtype)
        return torch.where(is_padding, first_BH1R, reference_BH1R)


def largest_rise(dtype: torch.dtype) -> float:
    """Returns the largest logit above that of the first key: half the exponent range of a dtype."""
    return math.log2(torch.finfo(dtype).max) / 2


def _first_of(logits_BHLR: Tensor, mask_BL: Tensor) -> Tensor:
    """Returns the logits of the first position that is not padding, or of the first one, BH1R."""
    first_B111 = mask_BL.int().argmax(dim=1)[:, None, None, None]
    _, heads, _, num_features = logits_BHLR.shape
    return logits_BHLR.gather(2, first_B111.expand(-1, heads, 1, num_features))


def _cut(logits: Tensor) -> Tensor:
    """Cuts logits relative to those of the first key, in place; warns of it on a CPU alone."""
    largest = largest_rise(logits.dtype)
    if logits.device.type == "cpu" and not is_compiling():
        # False for NaN too, so that rows before one are as they are without it.
        if bool(logits.amax() <= largest):
            return logits
        if bool((logits > largest).any()):
            warnings.warn(
                f"keys of causal attention have features of more than 2^{largest:.0f} times those "
                "of the first key, which are cut there: queries and keys this large have no useful "
                "estimate of softmax; train with model.qk_norm=true (docs/decisions/0019)",
                stacklevel=2,
            )
    return logits.clamp_(max=largest)
