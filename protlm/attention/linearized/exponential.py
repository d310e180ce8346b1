"""Features of tiles for bidirectional attention, relative to a reference if they are exponentials.

The reference of a feature is the largest logit of all unpadded keys of the sequence. It is updated
while the state is summed, and the state is then rescaled, as in flash attention (Milakov and
Gimelshein, arXiv 1805.02867).
"""

import torch
from torch import Tensor

from protlm.attention.linearized.features import (
    ExponentialFeatureMap,
    FeatureMap,
    Features,
    exponential,
    logit_floor,
)
from protlm.attention.linearized.operands import Kernel, Operands
from protlm.attention.ops.products import product
from protlm.attention.ops.tiles import Tile


class TileFeatures:
    """The features of one group of tiles.

    Args:
        operands: queries, keys and values.
        kernel: the kernel with the feature map.
        reference_BH1R: the reference of the whole group, for a backward pass.
    """

    def __init__(
        self, operands: Operands, kernel: Kernel, reference_BH1R: Tensor | None = None
    ) -> None:
        self.reference_BH1R = reference_BH1R
        self._operands, self._feature_map = operands, kernel.feature_map

    def add_keys(self, state: Tensor | None, tile: Tile) -> Tensor:
        """Adds [v | 1]ᵀφ(k) of a tile to the state, (B, H, C + 1, R), in place."""
        operands, feature_map = self._operands, self._feature_map
        if isinstance(feature_map, ExponentialFeatureMap):
            logits, _ = feature_map.key_logits(operands.keys(tile))
            operands.clear_padding(logits, tile, value=logit_floor(logits.dtype))
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
        """Computes the features of queries, after all keys were added."""
        return query_features(self._feature_map, self._operands.queries(tile), self.reference_BH1R)

    def keys(self, tile: Tile) -> Features:
        """Computes the features of keys, after all keys were added."""
        feature_map, k = self._feature_map, self._operands.keys(tile)
        if not isinstance(feature_map, ExponentialFeatureMap):
            return feature_map.keys(k)
        assert self.reference_BH1R is not None
        logits, pullback = feature_map.key_logits(k)
        self._operands.clear_padding(logits, tile, value=logit_floor(logits.dtype))
        return exponential(logits.sub_(self.reference_BH1R), pullback)


def query_features(
    feature_map: FeatureMap, q_BHLK: Tensor, reference_BH1R: Tensor | None
) -> Features:
    """Computes the features of queries, relative to the reference that only exponentials have."""
    if isinstance(feature_map, ExponentialFeatureMap):
        return feature_map.queries(q_BHLK, reference_BH1R)
    return feature_map.queries(q_BHLK)


def key_features(
    feature_map: FeatureMap, k_BHLK: Tensor, mask_BL: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Computes the features of whole sequences of keys, BHLR, and their reference, BH1R."""
    if not isinstance(feature_map, ExponentialFeatureMap):
        return feature_map.keys(k_BHLK).phi_BHLR, None
    logits_BHLR, _ = feature_map.key_logits(k_BHLK)
    if mask_BL is not None:
        logits_BHLR.masked_fill_(~mask_BL[:, None, :, None], logit_floor(k_BHLK.dtype))
    reference_BH1R = logits_BHLR.amax(dim=-2, keepdim=True)
    return logits_BHLR.sub_(reference_BH1R).exp2_(), reference_BH1R
