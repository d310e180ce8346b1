"""What the Performers do alike: linear attention over the features of their kernel, and its map."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from protlm.attention.base import Attention, RandomFeatures, Recurrent
from protlm.attention.masking import visible_keys, zero_padding
from protlm.attention.performer.bidirectional import BidirectionalAttention
from protlm.attention.performer.causal import CausalAttention
from protlm.attention.performer.features import FeatureMapFactory
from protlm.attention.performer.normalization import Denominator, Normalizer, Unnormalized
from protlm.attention.performer.operands import Kernel
from protlm.attention.performer.projection import Projection
from protlm.attention.precision import full_precision, wide, wide_dtype
from protlm.errors import UserError


class Performer(Attention, RandomFeatures, Recurrent[Tensor]):
    """Attention with weights φ(q)·φ(k), normalised; time and memory grow with L.

    Its recurrent state is the sum of [v | 1]ᵀφ(k) over the keys, (B, H, C + 1, R), in float32.
    Only `forward` carries gradients: maps, features and steps are for looking and sampling.

    Args:
        feature_map: makes the features of the kernel from a projection.
        num_features: features R of a position.
        projection: what the rows are drawn from; None for features without a projection.
        normalizer: what takes sums to outputs.
        redraw_every: optimiser steps between two draws; None keeps the first for good.
        seed: what the projections are drawn from, together with the redraw index.

    Raises:
        UserError: a number of steps below 1, or a redraw without a projection.
    """

    supports_bidirectional = True
    supports_causal = True
    cost: ClassVar[str] = "L R K"
    projection: Tensor | None
    redraw_index: Tensor

    def __init__(
        self,
        *,
        feature_map: FeatureMapFactory,
        num_features: int,
        projection: Projection | None,
        normalizer: Normalizer,
        redraw_every: int | None,
        seed: int,
    ) -> None:
        super().__init__()
        _check_redraw(redraw_every, has_projection=projection is not None)
        self.redraw_every = redraw_every
        self.num_features = num_features
        self._feature_map = feature_map
        self._law = projection
        self._normalizer = normalizer
        self._seed = seed
        rows_RK = None if projection is None else projection.draw(seed, 0).float()
        self.register_buffer("projection", rows_RK)
        self.register_buffer("redraw_index", torch.zeros((), dtype=torch.int64))

    def redraw(self, index: int) -> None:
        """Draws projection number `index`, a pure function of (seed, index), in place."""
        self.redraw_index.fill_(index)
        if self.projection is not None and self._law is not None:
            self.projection.copy_(self._law.draw(self._seed, index))

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
        out_BHLC = attend(q_BHLK, k_BHLK, v_BHLC, mask_BL, self._kernel(q_BHLK))
        assert isinstance(out_BHLC, Tensor)
        return out_BHLC

    @torch.no_grad()
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

        With a normaliser whose factor of a row depends on the values, a row's absolute entries sum
        to 1.

        Raises:
            UserError: float16 inputs.
        """
        _refuse_float16(q_BHLK, k_BHLK)
        rows = slice(None) if rows is None else rows
        q_BHMK, k_BHLK = zero_padding(q_BHLK, mask_BL)[:, :, rows], zero_padding(k_BHLK, mask_BL)
        hidden_keys_B1ML = ~visible_keys(mask_BL, rows, causal=causal)
        with full_precision(q_BHLK):
            phi_k_BHLR = self.key_features(k_BHLK.to(wide_dtype(q_BHLK)))
            weights_BHML = self.query_features(q_BHMK) @ phi_k_BHLR.mT
            return self._normalizer.weights(weights_BHML.masked_fill(hidden_keys_B1ML, 0))

    @property
    def has_denominators(self) -> bool:
        """Whether outputs are divided by the sums of their weights."""
        return isinstance(self._normalizer, Denominator)

    @torch.no_grad()
    def denominators(
        self, q_BHLK: Tensor, k_BHLK: Tensor, *, mask_BL: Tensor, causal: bool
    ) -> Tensor:
        """What each output is divided by, before any floor: the sum of its weights, BHL1.

        In the units of the products φ(q)·φ(k), in which a query's features have a factor of their
        own; 0 at padding. Time and memory are those of `forward` with values of width 1.

        Raises:
            UserError: float16 inputs.
        """
        _refuse_float16(q_BHLK, k_BHLK)
        attend = CausalAttention.apply if causal else BidirectionalAttention.apply
        ones_BHL1 = wide(k_BHLK).new_ones(*k_BHLK.shape[:-1], 1)
        kernel = replace(self._kernel(q_BHLK), normalizer=Unnormalized())
        sums_BHL1 = attend(q_BHLK, k_BHLK, ones_BHL1, mask_BL, kernel)
        assert isinstance(sums_BHL1, Tensor)
        return sums_BHL1

    @torch.no_grad()
    def query_features(self, q_BHLK: Tensor) -> Tensor:
        """φ(q), BHLR, up to a factor of each query; float32 (float64 for float64)."""
        return self._kernel(q_BHLK).feature_map.queries(wide(q_BHLK)).phi_BHLR

    @torch.no_grad()
    def key_features(self, k_BHLK: Tensor) -> Tensor:
        """φ(k), BHLR; float32 (float64 for float64)."""
        return self._kernel(k_BHLK).feature_map.keys(wide(k_BHLK)).phi_BHLR

    @torch.no_grad()
    def kernel(self, q_BHLK: Tensor, k_BHMK: Tensor) -> Tensor:
        """The kernel, or its estimate, of every query and key: BHLM, not normalised."""
        feature_map = self._kernel(q_BHLK).feature_map
        with full_precision(q_BHLK):
            products_BHLM = self.query_features(q_BHLK) @ self.key_features(k_BHMK).mT
            return products_BHLM * feature_map.log_factor(wide(q_BHLK)).exp()

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> Tensor:
        """See `Recurrent.initial_state`."""
        batch, heads, width = v_BHC.shape
        return wide(k_BHK).new_zeros(batch, heads, width + 1, self.num_features)

    @torch.no_grad()
    def step(
        self, state: Tensor, q_BHK: Tensor, k_BHK: Tensor, v_BHC: Tensor, *, hidden_BD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Recurrent.step`.

        Raises:
            UserError: float16 inputs.
        """
        _refuse_float16(q_BHK, k_BHK, v_BHC)
        with full_precision(v_BHC):
            phi_q_BH1R = self.query_features(q_BHK[:, :, None].to(state.dtype))
            phi_k_BH1R = self.key_features(k_BHK[:, :, None].to(state.dtype))
            values = torch.cat([v_BHC, torch.ones_like(v_BHC[..., :1])], dim=-1).to(state.dtype)
            state.addcmul_(values[..., None], phi_k_BH1R)
            out_BH1C, _ = self._normalizer(phi_q_BH1R @ state.mT)
        return state, out_BH1C[:, :, 0].to(v_BHC.dtype)

    def _kernel(self, x_BHLK: Tensor) -> Kernel:
        rows_RK = self.projection
        return Kernel(
            feature_map=self._feature_map(
                None if rows_RK is None else rows_RK.to(wide_dtype(x_BHLK))
            ),
            normalizer=self._normalizer,
            num_features=self.num_features,
            projection_RK=rows_RK,
        )


def _check_redraw(redraw_every: int | None, *, has_projection: bool) -> None:
    if redraw_every is None:
        return
    if redraw_every < 1:
        raise UserError(
            f"attention.redraw_every={redraw_every} must be at least 1; type "
            "attention.redraw_every=1000, or null for one draw"
        )
    if not has_projection:
        raise UserError(
            f"attention.redraw_every={redraw_every} needs a projection: set "
            "attention.num_features, or attention.redraw_every=null"
        )


def _refuse_float16(*inputs: Tensor) -> None:
    if any(x.dtype == torch.float16 for x in inputs):
        raise UserError(
            "a Performer cannot run in float16: its features and sums span more than the range "
            "of float16, and gradients become NaN; set trainer.precision=bf16-mixed or 32-true"
        )
