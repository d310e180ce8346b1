"""Random feature attention, RFA (Peng et al., arXiv 2103.02143)."""

import math
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.attention.base import Context, QueryKeyNorms, Recurrent
from protlm.attention.linearized.base import Performer
from protlm.attention.linearized.features import FeatureMap, FourierFeatures, GeneralizedFeatures
from protlm.attention.linearized.gated import gated_sums
from protlm.attention.linearized.gates import Gate, decay_
from protlm.attention.linearized.normalization import denominator, inverse_of_weight, normalized
from protlm.attention.ops.numerics import accum_dtype, no_autocast, recomputed, upcast, zero_padding
from protlm.attention.ops.projection import Projection, RowSampling
from protlm.attention.relatives import SeesRelatives, View
from protlm.config.fields import above, at_least


def gated_means(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    log_gate_BHL1: Tensor,
    mask_BL: Tensor,
    feature_map: FeatureMap,
) -> Tensor:
    """Returns the gated means of φ(q_i)·φ(k_j) [v_j | 1] over j ≤ i, (B, H, L, C + 1).

    The weights (1 - g_j) g_{j+1} … g_i sum to 1 - g_1 … g_i, by which the sums are divided: it
    would cancel in the output, but not in the floor of a denominator. In the dtype of the queries;
    they and keys are finite at padding.
    """
    written = recomputed(_written, v_BHLC.to(q_BHLK.dtype), log_gate_BHL1, mask_BL)
    sums = gated_sums(q_BHLK, k_BHLK, written, log_gate_BHL1, mask_BL, feature_map, True)
    return sums * inverse_of_weight(-torch.expm1(log_gate_BHL1.cumsum(dim=2)))


def _written(v_BHLC: Tensor, log_gate_BHL1: Tensor, mask_BL: Tensor) -> Tensor:
    return zero_padding(F.pad(v_BHLC, (0, 1), value=1.0), mask_BL) * -torch.expm1(log_gate_BHL1)


# Added to the norm that a vector is divided by, as in the code released with arXiv 2103.02143.
_NORM_EPSILON = 1e-3


class RfaKernel(StrEnum):
    """The kernels of arXiv 2103.02143, section 3.1."""

    gaussian = "gaussian"
    arccos = "arccos"


@final
class RandomFeatureAttention(SeesRelatives, Recurrent[Tensor]):
    """Softmax of unit vectors by random features; optionally with a forget gate where causal.

    With x̂ = x / (|x| + 10⁻³), one learned scale σ for each pair of coordinates i and i + K/2 of
    each head, initially 1, and `num_features` random rows ω_r ~ N(0, I), the weight of key k for
    query q is the mean over r of

        gaussian    cos(ω_r·(σ ⊙ (q̂ - k̂))), an estimate of exp(-|σ ⊙ (q̂ - k̂)|²/2)
        arccos      relu(ω_r·(σ ⊙ q̂)) relu(ω_r·(σ ⊙ k̂)), one of |x||y| (sin θ + (π - θ) cos θ) / 2π,
                    x = σ ⊙ q̂, y = σ ⊙ k̂ and θ the angle between them

    normalized over the keys (section 3.1). Between unit vectors the Gaussian is exp(q̂·k̂ - 1), so
    with σ = 1 it estimates softmax of logits within [-1, 1]. With the gate (section 3.2)

        S_t = g_t S_{t-1} + (1 - g_t) φ(k_t) v_tᵀ,  z_t = g_t z_{t-1} + (1 - g_t) φ(k_t)
        o_t = φ(q_t)ᵀS_t / φ(q_t)·z_t,  g_t = sigmoid(w·h_t + b) for each head

    with h the normalized input of the block. The gate starts with w ~ N(0, 0.02²) and biases for
    which 1 - g is 1/8 in the first head to 1/512 in the last, in equal ratios.

    The mean of cosines may be negative, and sums of them near 0. Therefore the denominator is at
    least a floor. It is the sum of the weights, with the gate divided by the sum of all
    (1 - g_j) g_{j+1} … g_t. The weights of a row at the floor sum to less than 1.

    Rows are independent of each other, as in the paper. There are three deviations:

    * Scales: the paper has one for each coordinate. Rotary positions rotate pairs of coordinates,
      so that |σ ⊙ (q̂ - k̂)| depends on positions only through their distance if a pair has one σ.
    * Floor: the released code clamps the denominator at 0.01, with features scaled by 0.01. That is
      a sum of weights of 0.01 / (64 · 0.01²) = 1.56 with 64 rows, so that a query that few keys
      resemble has small outputs. Here the default is 0.1; set `denominator_floor=1.56` for that.
    * Redraws: the released code draws rows per head and at every step, from a fixed set of
      matrices. Here the heads of a layer share one draw, renewed every 1,000 steps; σ makes heads
      differ. `redraw_every=1` draws at every step.
    """

    # The mechanism makes unit vectors itself.
    qk_norm = QueryKeyNorms.none
    cost: ClassVar[str] = "L R K"
    advice: ClassVar[str] = (
        "softmax-like weights that cannot become extreme; with the gate for generation, where near "
        "residues matter most"
    )

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        num_features: Annotated[int, at_least(1)] = 64,
        kernel: Annotated[str, RfaKernel] = "gaussian",
        gate: bool = False,
        denominator_floor: Annotated[float | None, above(0)] = 0.1,
        redraw_every: Annotated[int | None, at_least(1)] = 1000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        is_gaussian = kernel == RfaKernel.gaussian
        self.supports_bidirectional = not gate
        # The products of ReLU features are sums over the rows; the kernel is their mean.
        unit = 1 if is_gaussian else num_features
        floor = None if denominator_floor is None else denominator_floor * unit
        self._normalizer = denominator(floor, is_positive=not is_gaussian)
        self.performer = Performer(
            feature_map=(
                FourierFeatures
                if is_gaussian
                else partial(GeneralizedFeatures, kernel="relu", epsilon=0.0)
            ),
            num_features=2 * num_features if is_gaussian else num_features,
            projection=Projection(num_features, head_dim, sampling=RowSampling.iid),
            normalizer=self._normalizer,
            redraw_every=redraw_every,
            seed=seed,
        )
        # One-dimensional, so that weight decay skips the scales.
        self.scales = nn.Parameter(torch.ones(num_heads * math.ceil(head_dim / 2)))
        # The lengths of a helix and of a protein.
        memory_H = torch.logspace(3, 9, num_heads, base=2.0)
        self.gate = Gate(memory_H, model_dim=model_dim) if gate else None

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        hidden_BLD, mask_BL, causal = context[:3]
        q_BHLK, k_BHLK = self._scaled(q_BHLK, mask_BL), self._scaled(k_BHLK, mask_BL)
        if self.gate is None:
            return self.performer.mix(q_BHLK, k_BHLK, v_BHLC, context)
        assert causal, "the gate has no bidirectional form"
        log_gate_BHL1 = self.gate.logs(hidden_BLD, mask_BL)
        with no_autocast(v_BHLC):
            feature_map = self.performer.feature_map(accum_dtype(q_BHLK))
            means = gated_means(q_BHLK, k_BHLK, v_BHLC, log_gate_BHL1, mask_BL, feature_map)
            out_BHLC = normalized(means, self._normalizer)
        return zero_padding(out_BHLC, mask_BL).to(v_BHLC.dtype)

    def relatives_refusal(self, *, later: bool, apart: bool, runs: bool) -> str:
        return (
            "" if self.gate is None else "the gate of rfa has no form for relatives: omit gate=true"
        )

    def across(
        self, heads: Sequence[Tensor], context: Context, view: View, *, own: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert self.gate is None, "the gate is refused with relatives"
        q_BHLK, k_BHLK = (self._scaled(x, context.mask_BL) for x in heads[:2])
        return self.performer.across((q_BHLK, k_BHLK, heads[2]), context, view, own=own)

    def map_rows(self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, rows: slice) -> Tensor:
        if self.gate is not None:
            return super().map_rows(q_BHLK, k_BHLK, context, rows)
        q_BHLK, k_BHLK = (self._scaled(x, context.mask_BL) for x in (q_BHLK, k_BHLK))
        return self.performer.map_rows(q_BHLK, k_BHLK, context, rows)

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> Tensor:
        """Returns the sum of [v | 1]ᵀφ(k), (B, H, C + 1, R); with the gate, of [v | 1]ᵀ[φ(k) | 1].

        The last entry of the latter is the sum of the weights of the gate.
        """
        state = self.performer.initial_state(k_BHK, v_BHC)
        return state if self.gate is None else F.pad(state, (0, 1))

    @torch.no_grad()
    def step(
        self, state: Tensor, q_BHK: Tensor, k_BHK: Tensor, v_BHC: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        q_BH1K, k_BH1K = (self._scaled(x[:, :, None], context.mask_BL) for x in (q_BHK, k_BHK))
        if self.gate is None:
            return self.performer.step(state, q_BH1K.squeeze(2), k_BH1K.squeeze(2), v_BHC, context)
        gate_BH11 = self.gate(context.hidden_BLD, context.mask_BL)
        with no_autocast(v_BHC):
            feature_map = self.performer.feature_map(state.dtype)
            phi_q_BH1R, _ = feature_map.queries(q_BH1K)
            keys = F.pad(feature_map.keys(k_BH1K).phi_BHLR, (0, 1), value=1.0)
            values = F.pad(v_BHC.to(state.dtype), (0, 1), value=1.0)[..., None]
            written = values * torch.sigmoid(-gate_BH11)
            decay_(state, F.logsigmoid(gate_BH11))
            state.addcmul_(written, keys)
            means = phi_q_BH1R @ state[..., :-1].mT * inverse_of_weight(state[..., -1:, -1:])
            out_BH1C, _ = self._normalizer(means)
        return state, out_BH1C.squeeze(2).to(v_BHC.dtype)

    def _scaled(self, x_BHLK: Tensor, mask_BL: Tensor) -> Tensor:
        pairs = self.scales.unflatten(0, (x_BHLK.shape[1], 1, -1))
        scales_H1K = torch.cat([pairs, pairs], dim=-1)[..., : x_BHLK.shape[-1]]
        with no_autocast(x_BHLK):
            x_BHLK = upcast(zero_padding(x_BHLK, mask_BL))
            # torch sets the gradient of the norm of a zero vector to 0.
            norm_BHL1 = torch.linalg.vector_norm(x_BHLK, dim=-1, keepdim=True)
            return x_BHLK / (norm_BHL1 + _NORM_EPSILON) * upcast(scales_H1K)
