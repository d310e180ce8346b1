"""Features of tiles of positions, relative to a reference if they are exponentials.

The reference of a feature of bidirectional attention is the largest logit of all unpadded keys of
the sequence. It is updated while the state is summed, and the state is then rescaled, as in flash
attention (Milakov and Gimelshein, arXiv 1805.02867).

That of causal attention must not depend on later keys: it is the logit of the first unpadded key,
which every query sees. Logits are cut at `largest_rise` above it, so that sums of features are
finite. Keys of trained models are not cut (docs/decisions/0019); a cut one has too little weight.
"""

import math
import warnings

import torch
from torch import Tensor
from torch.compiler import is_compiling

from protlm.attention.linearized.features import (
    ExponentialFeatureMap,
    FeatureMap,
    Features,
    Pullback,
    exponential,
    logit_floor,
)
from protlm.attention.linearized.operands import Operands
from protlm.attention.ops.products import product
from protlm.attention.ops.tiles import Tile


class TileFeatures:
    """The features of one group of tiles.

    Args:
        operands: queries, keys and values.
        feature_map: the feature map.
        reference_BH1R: the reference of the whole group, for a backward pass.
    """

    def __init__(
        self, operands: Operands, feature_map: FeatureMap, reference_BH1R: Tensor | None = None
    ) -> None:
        self.reference_BH1R = reference_BH1R
        self.operands, self._feature_map = operands, feature_map

    def add_keys(self, state: Tensor | None, tile: Tile) -> Tensor:
        """Adds [v | 1]ᵀφ(k) of a tile to the state, (B, H, C + 1, R), in place."""
        operands, feature_map = self.operands, self._feature_map
        if isinstance(feature_map, ExponentialFeatureMap):
            logits, _ = self._key_logits(feature_map, tile)
            highest = logits.amax(dim=-2, keepdim=True)
            if state is not None and self.reference_BH1R is not None:
                highest = torch.maximum(highest, self.reference_BH1R)
                state.mul_((self.reference_BH1R - highest).exp2_())
            self.reference_BH1R = highest
            phi = logits.sub_(highest).exp2_()
        else:
            phi = feature_map.keys(operands.keys(tile)).phi_BHLR
        increment = product(
            operands.transposed_values_and_ones(tile), phi.mT, dtype=operands.product_dtype
        )
        return increment if state is None else state.add_(increment)

    def queries(self, tile: Tile) -> Features:
        """Computes the features of queries, after the keys that they see."""
        return self._feature_map.queries(self.operands.queries(tile), self.reference_BH1R)

    def keys(self, tile: Tile, *, causal: bool = False) -> Features:
        """Computes the features of keys: if not causal, after all keys were added."""
        feature_map = self._feature_map
        if not isinstance(feature_map, ExponentialFeatureMap):
            return feature_map.keys(self.operands.keys(tile))
        logits, pullback = self._key_logits(feature_map, tile)
        if causal:
            self.reference_BH1R = self._first_reference(logits, tile)
        assert self.reference_BH1R is not None
        logits.sub_(self.reference_BH1R)
        return exponential(_cut(logits) if causal else logits, pullback)

    def _key_logits(
        self, feature_map: ExponentialFeatureMap, tile: Tile
    ) -> tuple[Tensor, Pullback]:
        logits, pullback = feature_map.key_logits(self.operands.keys(tile))
        floor = logit_floor(logits.dtype)
        return self.operands.clear_padding(logits, tile, value=floor), pullback

    def _first_reference(self, logits: Tensor, tile: Tile) -> Tensor:
        """Returns the logits of the first keys; the floor for a sample of padding so far."""
        reference_BH1R = self.reference_BH1R
        if reference_BH1R is not None and not self.operands.may_have_padding:
            return reference_BH1R
        first_BH1R = _first_of(logits, self.operands.is_seen(tile))
        if reference_BH1R is None:
            return first_BH1R
        is_padding = reference_BH1R == logit_floor(logits.dtype)
        return torch.where(is_padding, first_BH1R, reference_BH1R)


def key_features(
    feature_map: FeatureMap, k_BHLK: Tensor, mask_BL: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """Computes the features of whole sequences of keys, BHLR, and their reference, BH1R."""
    if not isinstance(feature_map, ExponentialFeatureMap):
        return feature_map.keys(k_BHLK).phi_BHLR, None
    logits_BHLR, _ = feature_map.key_logits(k_BHLK)
    logits_BHLR.masked_fill_(~mask_BL[:, None, :, None], logit_floor(k_BHLK.dtype))
    if causal:
        reference_BH1R = _first_of(logits_BHLR, mask_BL)
        return _cut(logits_BHLR.sub_(reference_BH1R)).exp2_(), reference_BH1R
    reference_BH1R = logits_BHLR.amax(dim=-2, keepdim=True)
    return logits_BHLR.sub_(reference_BH1R).exp2_(), reference_BH1R


def largest_rise(dtype: torch.dtype) -> float:
    """Returns the largest logit above that of the first key: half the exponent range of a dtype."""
    return math.log2(torch.finfo(dtype).max) / 2


def _first_of(logits_BHLR: Tensor, mask_BL: Tensor) -> Tensor:
    """Returns the logits of the first position that is not padding, or of the first one, BH1R."""
    first_B111 = mask_BL.int().argmax(dim=1)[:, None, None, None]
    _, heads, _, num_features = logits_BHLR.shape
    return logits_BHLR.gather(2, first_B111.expand(-1, heads, 1, num_features))


def _cut(logits: Tensor) -> Tensor:
    """Cuts logits relative to those of the first key, in place.

    On a CPU it warns of it. A GPU would be waited for.
    """
    largest = largest_rise(logits.dtype)
    if logits.device.type == "cpu" and not is_compiling():
        # The comparison is false for NaN too, so that rows before one are as they are without it.
        if bool(logits.amax() <= largest):
            return logits
        warnings.warn(
            f"keys of causal attention have features of more than 2^{largest:.0f} times those of "
            "the first key, which are cut there: queries and keys this large have no useful "
            "estimate of softmax; train with model.qk_norm=true (docs/decisions/0019)",
            stacklevel=2,
        )
    return logits.clamp_(max=largest)
