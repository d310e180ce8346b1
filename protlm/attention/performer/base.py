"""What the Performers do alike: linear attention over the features of their kernel, and its map."""

from typing import ClassVar

import torch
from torch import Tensor

from protlm.attention.base import Attention, RandomFeatures
from protlm.attention.masking import visible_keys
from protlm.attention.performer.bidirectional import BidirectionalAttention
from protlm.attention.performer.causal import CausalAttention
from protlm.attention.performer.features import FeatureMaps
from protlm.attention.performer.operands import Operands, full_precision, inverse_of_weight
from protlm.attention.performer.projection import orthogonal_projection, projection_generator
from protlm.errors import UserError


class Performer(Attention, RandomFeatures):
    """Attention with weights φ(q)·φ(k), normalised over the keys; time and memory grow with L.

    Args:
        maps: the feature maps of the kernel.
        head_dim: width K of a query and a key.
        num_features: random features R of the projection; None for features without one.
        redraw_every: optimiser steps between two draws; None keeps the first for good.
        seed: what the projections are drawn from, together with the redraw index.

    Raises:
        UserError: a number of features or steps below 1, or a redraw without a projection.
    """

    supports_bidirectional: ClassVar[bool] = True
    supports_causal: ClassVar[bool] = True
    projection: Tensor | None
    redraw_index: Tensor

    def __init__(
        self,
        *,
        maps: FeatureMaps,
        head_dim: int,
        num_features: int | None,
        redraw_every: int | None,
        seed: int,
    ) -> None:
        super().__init__()
        for name, count in (("num_features", num_features), ("redraw_every", redraw_every)):
            if count is not None and count < 1:
                raise UserError(f"attention.{name}={count} must be at least 1")
        if num_features is None and redraw_every is not None:
            raise UserError(
                f"attention.redraw_every={redraw_every} needs a projection: set "
                "attention.num_features, or attention.redraw_every=null"
            )
        self.redraw_every = redraw_every
        self._maps = maps
        self._seed = seed
        shape = None if num_features is None else (num_features, head_dim)
        self.register_buffer("projection", None if shape is None else torch.empty(shape))
        self.register_buffer("redraw_index", torch.zeros((), dtype=torch.int64))
        self.redraw(0)

    def redraw(self, index: int) -> None:
        """Draws projection number `index`, a pure function of (seed, index), in place."""
        self.redraw_index.fill_(index)
        if self.projection is not None:
            num_features, head_dim = self.projection.shape
            generator = projection_generator(self._seed, index)
            self.projection.copy_(orthogonal_projection(num_features, head_dim, generator))

    def forward(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        *,
        hidden_BLD: Tensor,
        mask_BL: Tensor,
        causal: bool,
    ) -> Tensor:
        """See `Attention.forward`.

        Raises:
            UserError: float16 inputs.
        """
        _refuse_float16(q_BHLK, k_BHLK, v_BHLC)
        attend = CausalAttention.apply if causal else BidirectionalAttention.apply
        out_BHLC = attend(q_BHLK, k_BHLK, v_BHLC, mask_BL, self.projection, self._maps)
        assert isinstance(out_BHLC, Tensor)
        return out_BHLC

    def attention_map(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        *,
        hidden_BLD: Tensor,
        mask_BL: Tensor,
        causal: bool,
        rows: slice | None = None,
    ) -> Tensor:
        """The map or a block of its rows, in float32 (float64 for float64 queries).

        Raises:
            UserError: float16 inputs.
        """
        _refuse_float16(q_BHLK, k_BHLK)
        rows = slice(None) if rows is None else rows
        operands = Operands(q_BHLK, k_BHLK, k_BHLK, mask_BL, self.projection, self._maps)
        hidden_keys_B1ML = ~visible_keys(mask_BL, rows, causal=causal)
        with full_precision(q_BHLK):
            weights_BHML = operands.query_features(rows) @ operands.key_features(slice(None)).mT
            weights_BHML = weights_BHML.masked_fill(hidden_keys_B1ML, 0)
            return weights_BHML * inverse_of_weight(weights_BHML.sum(dim=-1, keepdim=True))


def _refuse_float16(*inputs: Tensor) -> None:
    if any(x.dtype == torch.float16 for x in inputs):
        raise UserError(
            "a Performer cannot run in float16: its features and sums span more than the range "
            "of float16, and gradients become NaN; set trainer.precision=bf16-mixed or 32-true"
        )
