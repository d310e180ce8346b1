"""Random feature attention, RFA (Peng et al., arXiv 2103.02143)."""

import math
from enum import StrEnum
from functools import partial
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.attention.base import Attention, Recurrent
from protlm.attention.masking import zero_padding
from protlm.attention.performer.base import Performer
from protlm.attention.performer.features import FeatureMapFactory
from protlm.attention.performer.gated import Gate, gated_means
from protlm.attention.performer.generalized import GeneralizedFeatures
from protlm.attention.performer.normalization import Denominator, inverse_of_weight
from protlm.attention.performer.operands import Kernel
from protlm.attention.performer.projection import Law, Projection
from protlm.attention.performer.trigonometric import FourierFeatures
from protlm.attention.precision import full_precision, wide_dtype
from protlm.attention.unit_vectors import ScaledUnitVectors
from protlm.errors import UserError, refuse_unknown


class RfaKernel(StrEnum):
    """The kernels of arXiv 2103.02143, section 3.1."""

    gaussian = "gaussian"
    arccos = "arccos"


@final
class RandomFeatureAttention(Attention, Recurrent[Tensor]):
    """Softmax of unit vectors by random features; where causal, a gate may forget the past.

    With x̂ = x / (|x| + 10⁻³), one learned scale σ for each coordinate of each head, at first 1,
    and random rows ω_r ~ N(0, I), the weight of key k for query q is the mean over r of

        gaussian    cos(ω_r·(σ ⊙ (q̂ - k̂))), an estimate of exp(-|σ ⊙ (q̂ - k̂)|²/2)
        arccos      relu(ω_r·(σ ⊙ q̂)) relu(ω_r·(σ ⊙ k̂)), one of |x||y| (sin θ + (π - θ) cos θ) / 2π,
                    x = σ ⊙ q̂, y = σ ⊙ k̂ and θ the angle between them

    normalised over the keys (section 3.1). Between unit vectors the Gaussian is exp(q̂·k̂ - 1), so
    with σ = 1 it estimates softmax of logits within [-1, 1]. With the gate (section 3.2)

        S_t = g_t S_{t-1} + (1 - g_t) φ(k_t) v_tᵀ,  z_t = g_t z_{t-1} + (1 - g_t) φ(k_t)
        o_t = φ(q_t)ᵀS_t / φ(q_t)·z_t,  g_t = sigmoid(w·h_t + b) for each head

    with h the block's normalised input. It starts with w ~ N(0, 0.02²) and biases for which 1 - g
    is 1/8 in the first head to 1/512 in the last, in equal ratios.

    The mean of cosines may be negative, and sums of them near 0. So what is divided by, the sum of
    the weights (with the gate over the sum of all (1 - g_j) g_{j+1} … g_t), is at least the floor;
    a row's weights then sum to less than 1. The released code has such a floor too.

    Unlike the paper, all heads of a layer share one draw of the rows; σ makes them differ. As in
    it, rows are independent of each other.

    Args:
        num_heads: heads H.
        head_dim: width K of a query and a key.
        model_dim: width D of the block's input, for the gate.
        num_features: random rows; `gaussian` has two features for each.
        kernel: `gaussian` or `arccos`.
        gate: whether each position may forget those before: causal only.
        denominator_floor: the least sum of weights that is divided by; None, for `arccos` only,
            for no floor. The Gaussian of unit vectors is at least exp(-2) = 0.14 while σ is 1.
        redraw_every: optimiser steps between two draws; None keeps the first for good.
        seed: what the rows are drawn from, together with the redraw index.

    Raises:
        UserError: no features, an unknown kernel, a floor that is not above 0 or lacking where
            weights may be negative, or a number of steps below 1.
    """

    supports_bidirectional = True
    supports_causal = True
    cost: ClassVar[str] = "L R K"
    advice: ClassVar[str] = (
        "softmax-like weights that cannot become extreme; the gate for generation, where near "
        "residues matter most"
    )

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        num_features: int = 64,
        kernel: str = "gaussian",
        gate: bool = False,
        denominator_floor: float | None = 0.1,
        redraw_every: int | None = 1000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        refuse_unknown("attention.kernel", kernel, RfaKernel)
        _check_floor(denominator_floor, kernel)
        is_gaussian = kernel == RfaKernel.gaussian
        self.supports_bidirectional = not gate
        self._feature_map: FeatureMapFactory = (
            FourierFeatures
            if is_gaussian
            else partial(GeneralizedFeatures, kernel="relu", epsilon=0.0)
        )
        # Products of relu features are sums over the rows, of which the kernel is the mean.
        unit = 1 if is_gaussian else num_features
        self._normalizer = Denominator(
            None if denominator_floor is None else denominator_floor * unit
        )
        self.performer = Performer(
            feature_map=self._feature_map,
            num_features=2 * num_features if is_gaussian else num_features,
            projection=Projection(num_features, head_dim, law=Law.iid),
            normalizer=self._normalizer,
            redraw_every=redraw_every,
            seed=seed,
        )
        # Flat, because weight decay, which a scale should not have, is for matrices.
        self.scales = nn.Parameter(torch.ones(num_heads * head_dim))
        self.gate = Gate(num_heads=num_heads, model_dim=model_dim) if gate else None

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
            UserError: float16 values without the gate.
        """
        q_BHLK, k_BHLK = self._scaled(q_BHLK, mask_BL), self._scaled(k_BHLK, mask_BL)
        if self.gate is None:
            return self.performer(
                q_BHLK, k_BHLK, v_BHLC, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal
            )
        assert causal, "a gate forgets the past: it has no bidirectional form"
        gate_BHL1 = self.gate(hidden_BLD, mask_BL)
        with full_precision(v_BHLC):
            means = gated_means(q_BHLK, k_BHLK, v_BHLC, gate_BHL1, mask_BL, self._kernel(q_BHLK))
            out_BHLC, _ = self._normalizer(means)
        return zero_padding(out_BHLC, mask_BL).to(v_BHLC.dtype)

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
        """See `Attention.attention_map`; in float32 (float64 for float64 queries)."""
        if self.gate is not None:
            return super().attention_map(
                q_BHLK, k_BHLK, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal, rows=rows
            )
        return self.performer.attention_map(
            self._scaled(q_BHLK, mask_BL),
            self._scaled(k_BHLK, mask_BL),
            hidden_BLD=hidden_BLD,
            mask_BL=mask_BL,
            causal=causal,
            rows=rows,
        )

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> Tensor:
        """The sum of [v | 1]ᵀφ(k), (B, H, C + 1, R); with the gate of [v | 1]ᵀ[φ(k) | 1].

        The last entry of the latter is the sum of the gates' weights.
        """
        state = self.performer.initial_state(k_BHK, v_BHC)
        return state if self.gate is None else F.pad(state, (0, 1))

    @torch.no_grad()
    def step(
        self, state: Tensor, q_BHK: Tensor, k_BHK: Tensor, v_BHC: Tensor, *, hidden_BD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Recurrent.step`."""
        mask_B1 = torch.ones_like(q_BHK[:, 0, :1], dtype=torch.bool)
        q_BH1K, k_BH1K = (self._scaled(x[:, :, None], mask_B1) for x in (q_BHK, k_BHK))
        if self.gate is None:
            return self.performer.step(
                state, q_BH1K.squeeze(2), k_BH1K.squeeze(2), v_BHC, hidden_BD=hidden_BD
            )
        gate_BH11 = self.gate(hidden_BD[:, None], mask_B1)
        with full_precision(v_BHC):
            phi_q_BH1R = self.performer.query_features(q_BH1K)
            keys = F.pad(self.performer.key_features(k_BH1K), (0, 1), value=1.0)
            values = F.pad(v_BHC.to(state.dtype), (0, 1), value=1.0)[..., None]
            written = values * torch.sigmoid(-gate_BH11)
            state.mul_(torch.sigmoid(gate_BH11)).addcmul_(written, keys)
            means = phi_q_BH1R @ state[..., :-1].mT * inverse_of_weight(state[..., -1:, -1:])
            out_BH1C, _ = self._normalizer(means)
        return state, out_BH1C.squeeze(2).to(v_BHC.dtype)

    def _scaled(self, x_BHLK: Tensor, mask_BL: Tensor) -> Tensor:
        scales_H1K = self.scales.unflatten(0, (x_BHLK.shape[1], 1, -1))
        scaled_BHLK = ScaledUnitVectors.apply(x_BHLK, scales_H1K, mask_BL)
        assert isinstance(scaled_BHLK, Tensor)
        return scaled_BHLK

    def _kernel(self, x_BHLK: Tensor) -> Kernel:
        rows_RK = self.performer.projection
        assert rows_RK is not None
        return Kernel(
            feature_map=self._feature_map(rows_RK.to(wide_dtype(x_BHLK))),
            normalizer=self._normalizer,
            num_features=self.performer.num_features,
            projection_RK=rows_RK,
        )


def _check_floor(floor: float | None, kernel: str) -> None:
    if floor is None and kernel == RfaKernel.gaussian:
        raise UserError(
            "attention.denominator_floor=null leaves sums of weights unguarded that may be "
            "negative or near 0 with attention.kernel=gaussian; type "
            "attention.denominator_floor=0.1"
        )
    if floor is not None and not 0 < floor < math.inf:
        raise UserError(
            f"attention.denominator_floor={floor} must be a number above 0; type "
            "attention.denominator_floor=0.1"
        )
