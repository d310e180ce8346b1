"""The base class of the Performers: linear attention with random features, and its map."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling, is_exporting

from protlm.attention.base import (
    Context,
    QueryKeyNorms,
    RandomFeatures,
    Recurrent,
)
from protlm.attention.linearized.case import Attend, Case
from protlm.attention.linearized.families import ProteinSums, ReadSums, Sums, seen
from protlm.attention.linearized.features import FeatureMap, FeatureMapFactory
from protlm.attention.linearized.function import Weighting, graph_attention, linear_attention
from protlm.attention.linearized.gated import gated_sums
from protlm.attention.linearized.gates import Decay, Gate, decay_, decays
from protlm.attention.linearized.normalization import Denominator, normalized
from protlm.attention.linearized.operands import Operands
from protlm.attention.linearized.positive import ExponentialFeatureMap, logit_floor
from protlm.attention.linearized.selection import Backend, chosen_attention, has_fused
from protlm.attention.linearized.tiles import WHOLE
from protlm.attention.ops.numerics import (
    accum_dtype,
    no_autocast,
    not_compiled,
    upcast,
    visible_keys,
    zero_padding,
)
from protlm.attention.ops.products import operand_dtype
from protlm.attention.ops.projection import Projection
from protlm.attention.relatives import SeesRelatives, View
from protlm.bounds import Bounds
from protlm.system.errors import OptionError, UserError

_BY_SUM = Denominator()
# The logarithm of a gate that lets nothing through, of which sums to base 2 are exact.
_CLOSED = -1024.0 * math.log(2)
# Positions of all heads up to which two products in a graph are level with fused kernels (H200).
_LEVEL = 1 << 18


class Performer(SeesRelatives, RandomFeatures, Recurrent[Tensor]):
    """Attention with weights φ(q)·φ(k), normalized; time and memory are linear in L.

    The recurrent state is the sum of [v | 1]ᵀφ(k) over the keys, (B, H, C + 1, R), in float32. For
    features that are exponentials it has one more row, the reference of the sums: the largest logit
    of each feature so far, lowered with its decayed sum. Only `mix` is differentiable; maps and
    steps are not. `projection` is None for features without one.

    With a decay, the weight of key j for query i is multiplied by the gates that lie between them,
    the query's own included and the key's left out:

        g_{j+1} … g_i for j < i,  1 for j = i,  g_i … g_{j-1} for j > i

    which is the recurrence S_i = g_i S_{i-1} + φ(k_i) v_iᵀ in either direction (Afzal et al., arXiv
    2502.16249); causal attention has j ≤ i alone. g_i = σ(b) with `learned`, one number per head,
    so that the factor is g^|i-j| (LION-D; RetNet, arXiv 2307.08621), and σ(w·h_i + b) with
    `selective`, h the normalized input of the block (LION-S; arXiv 2312.06635 where causal). The
    gate of padding is 1. Relative to the largest feature of all keys (causal: that of the first
    one), a row whose decayed weights sum to less than 1e-30 in float32 is 0.
    """

    exports = True
    qk_norm = QueryKeyNorms.bounded
    cost: ClassVar[str] = "L R K"
    projection: Tensor | None
    redraw_index: Tensor

    def __init__(
        self,
        *,
        feature_map: FeatureMapFactory,
        num_features: int,
        projection: Projection | None = None,
        normalizer: Denominator = _BY_SUM,
        redraw_every: int | None = None,
        seed: int = 0,
        backend: str = Backend.torch,
    ) -> None:
        super().__init__()
        # In the dtype of the weights that follow.
        _refuse_float16(torch.empty(0))
        if redraw_every is not None and projection is None:
            raise OptionError(
                lambda at: (
                    f"{at}redraw_every={redraw_every} needs a projection: set {at}num_features, or "
                    f"{at}redraw_every=null"
                )
            )
        self.redraw_every = redraw_every
        self.num_features = num_features
        self._feature_map = feature_map
        self._projection_rows = projection
        self._normalizer = normalizer
        self._seed = seed
        rows_RK = None if projection is None else projection.draw(seed, 0).float()
        first_map = feature_map(rows_RK)
        self._is_exponential = isinstance(first_map, ExponentialFeatureMap)
        self._backend = Backend(backend)
        # Whether a compiler may take two products, and fuse what is around them.
        self._is_plain = (
            not self._is_exponential
            and projection is None
            and has_fused(first_map, normalizer)
            and backend != Backend.triton
        )
        self.gate: Gate | None = None
        if backend == Backend.triton and not has_fused(first_map, normalizer):
            raise OptionError(
                lambda at: (
                    f"{at}backend=triton is for positive and ReLU features; set {at}backend=auto"
                )
            )
        self.register_buffer("projection", rows_RK)
        self.register_buffer("redraw_index", torch.zeros((), dtype=torch.int64))

    def _let_decay(self, decay: str, *, num_heads: int, model_dim: int) -> None:
        """Adds a gate, with new parameters, unless `decay` is none."""
        if decay != Decay.none and self._backend is Backend.triton:
            raise OptionError(
                lambda at: (
                    f"{at}backend=triton has no kernels for {at}decay={decay}; set "
                    f"{at}backend=auto, or {at}decay=none"
                )
            )
        self.gate = Gate.of(decay, num_heads=num_heads, model_dim=model_dim)
        self.exports = self.gate is None

    def redraw(self, index: int) -> None:
        self.redraw_index.fill_(index)
        if self.projection is not None and self._projection_rows is not None:
            self.projection.copy_(self._projection_rows.draw(self._seed, index))

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        hidden_BLD, mask_BL, causal = context[:3]
        _refuse_float16(q_BHLK, k_BHLK, v_BHLC)
        feature_map = self.feature_map(accum_dtype(q_BHLK))
        weighting = Weighting(feature_map, self._normalizer, causal)
        if is_exporting() and self.gate is None:
            return graph_attention(q_BHLK, k_BHLK, v_BHLC, mask_BL, weighting)
        fused = self._fused((q_BHLK, k_BHLK, v_BHLC), causal=causal, is_packed=False)
        is_level = fused is None or q_BHLK.shape[:-1].numel() <= _LEVEL
        if self._is_plain and is_level and is_compiling() and not causal and self.gate is None:
            _, _, epsilon = feature_map.fused_rows(q_BHLK)
            return relu_attention(q_BHLK, k_BHLK, v_BHLC, mask_BL, epsilon)
        if fused is not None:
            return fused(q_BHLK, k_BHLK, v_BHLC, mask_BL)
        if self.gate is not None:
            log_gate_BHL1 = self.gate.logs(hidden_BLD, mask_BL)
            return self._gated((q_BHLK, k_BHLK, v_BHLC), log_gate_BHL1, mask_BL, causal)
        return linear_attention(q_BHLK, k_BHLK, v_BHLC, mask_BL, weighting)

    def _fused(self, heads: Sequence[Tensor], *, causal: bool, is_packed: bool) -> Attend | None:
        q_BHLK, k_BHLK, v_BHLC = heads
        feature_map = self.feature_map(accum_dtype(q_BHLK))
        case = Case.of(
            q_BHLK,
            k_BHLK,
            v_BHLC,
            feature_map,
            causal=causal,
            has_decay=self.gate is not None,
            is_packed=is_packed,
        )
        return chosen_attention(self._backend, feature_map, self._normalizer, case)

    def _gated(
        self, heads: Sequence[Tensor], log_gate_BHL1: Tensor, mask_BL: Tensor, causal: bool
    ) -> Tensor:
        q_BHLK, k_BHLK, v_BHLC = heads
        given = q_BHLK, k_BHLK, F.pad(v_BHLC, (0, 1), value=1.0), log_gate_BHL1, mask_BL
        sums = gated_sums(*given, self.feature_map(accum_dtype(q_BHLK)), causal)
        return zero_padding(normalized(sums, self._normalizer), mask_BL).to(v_BHLC.dtype)

    def forward_packed(self, heads: Sequence[Tensor], context: Context, bounds: Bounds) -> Tensor:
        """Returns the mixed values; fused kernels read the bounds.

        Without these kernels, gates are closed between proteins in a compiled graph, which cannot
        depend on their bounds. Exponential features, with a reference for each protein, and decays
        are not compiled.
        """
        _refuse_float16(*heads)
        fused = self._fused(heads, causal=context.causal, is_packed=True)
        if fused is not None:
            return fused(*heads, context.mask_BL, bounds.cu_seqlens)
        if not is_compiling() or self.gate is not None or self._is_exponential:
            return self._one_by_one(heads, context, bounds)
        given = *heads, context.mask_BL[:, None, :, None]
        place_L, (*spread, mask_B1M1) = bounds.with_gaps(given, 1)
        log_gate_BHM1 = (~mask_B1M1 * _CLOSED).expand(-1, heads[0].shape[1], -1, -1)
        out_BHMC = self._gated(spread, log_gate_BHM1, mask_B1M1[:, 0, :, 0], context.causal)
        return out_BHMC.index_select(2, place_L)

    @not_compiled
    def _one_by_one(self, heads: Sequence[Tensor], context: Context, bounds: Bounds) -> Tensor:
        """Sums over the keys of each protein where they lie; on a GPU, or with a decay, in rows."""
        if self.gate is not None or heads[0].device.type != "cpu":
            return super().forward_packed(heads, context, bounds)
        feature_map = self.feature_map(accum_dtype(heads[0]))
        weighting = Weighting(feature_map, self._normalizer, context.causal, bounds.spans)
        # Spans have no padding.
        return linear_attention(*heads, torch.ones_like(context.mask_BL), weighting)

    def relatives_refusal(self, *, later: bool, apart: bool, runs: bool) -> str:
        if self.gate is None or apart:
            return ""
        return "a decay counts within a protein: type model.relatives_sum=apart, or omit the decay"

    @not_compiled
    def across(
        self, heads: Sequence[Tensor], context: Context, view: View, *, own: bool
    ) -> tuple[Tensor, Tensor | None]:
        _refuse_float16(*heads)
        assert self.gate is None or not own, "a decay counts within a protein"
        feature_map, bounds = self.feature_map(accum_dtype(heads[0])), view.bounds
        is_causal, entering, leaving = own and context.causal, self._entering(view, heads[2]), None
        members = bounds.members if view.keeps or not is_causal else []
        if not (own or view.keeps) and all(one.stop - one.start == 1 for one in members):
            # Proteins without relatives in the row see what entered, and nothing else.
            if entering is None:
                return torch.zeros_like(heads[2]), None
            q_BHLK = zero_padding(upcast(heads[0]), context.mask_BL)
            out_BHLC = ReadSums.apply(q_BHLK, *entering, feature_map, self._normalizer)
            return zero_padding(out_BHLC, context.mask_BL).to(heads[2].dtype), None
        pieces, places = bounds.pieces([upcast(x) for x in heads])
        outs = [torch.zeros_like(v) for _, _, v in pieces]
        for family in members:
            here = places[family]
            proteins = [Sums(*ProteinSums.apply(*pieces[n][1:], feature_map)) for n in here]
            first = Sums.none(*proteins[0]) if entering is None else entering
            before, leaving = seen(proteins, first, own=own, later=view.later)
            for n, sums in zip(here, () if is_causal else before, strict=not is_causal):
                outs[n] = ReadSums.apply(pieces[n][0], *sums, feature_map, self._normalizer)
        state = None
        if view.keeps and leaving is not None:
            state = torch.cat([x for x in leaving if x is not None], dim=-2)
        if not is_causal:
            return torch.cat(outs, dim=2).to(heads[2].dtype), state
        assert bounds.families is not None
        weighting = Weighting(feature_map, self._normalizer, True, bounds.families.spans, entering)
        return linear_attention(*heads, torch.ones_like(context.mask_BL), weighting), state

    def _entering(self, view: View, v_BHLC: Tensor) -> Sums | None:
        """Returns the sums of a context; values give their width."""
        if view.entering is None:
            return None
        sums, reference = view.entering.split_with_sizes(
            [v_BHLC.shape[-1] + 1, int(self._is_exponential)], dim=-2
        )
        return Sums(sums, reference if self._is_exponential else None)

    @torch.no_grad()
    def map_rows(self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, rows: slice) -> Tensor:
        hidden_BLD, mask_BL, causal = context[:3]
        _refuse_float16(q_BHLK, k_BHLK)
        q_BHMK = zero_padding(q_BHLK, mask_BL)[:, :, rows]
        hidden_keys_B1ML = ~visible_keys(mask_BL, rows, causal=causal)
        with no_autocast(q_BHLK):
            feature_map = self.feature_map(accum_dtype(q_BHLK))
            # Maps have no values.
            operands = Operands(q_BHLK, k_BHLK, k_BHLK, mask_BL, feature_map)
            if not causal:
                operands.raise_reference(WHOLE)
            phi_k_BHLR, _ = operands.keys(WHOLE, causal=causal)
            phi_q_BHMR, _ = feature_map.queries(upcast(q_BHMK), operands.reference_BH1R)
            weights_BHML = phi_q_BHMR @ phi_k_BHLR.mT
            if self.gate is not None:
                weights_BHML *= decays(self.gate.logs(hidden_BLD, mask_BL), rows)
            return self._normalizer.weights(weights_BHML.masked_fill(hidden_keys_B1ML, 0))

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> Tensor:
        batch, heads, width = v_BHC.shape
        state = upcast(k_BHK).new_zeros(batch, heads, width + 1, self.num_features)
        if not self._is_exponential:
            return state
        return F.pad(state, (0, 0, 0, 1), value=logit_floor(state.dtype))

    @torch.no_grad()
    def step(
        self, state: Tensor, q_BHK: Tensor, k_BHK: Tensor, v_BHC: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        _refuse_float16(q_BHK, k_BHK, v_BHC)
        with no_autocast(v_BHC):
            feature_map = self.feature_map(state.dtype)
            q_BH1K, k_BH1K = (x_BHK[:, :, None].to(state.dtype) for x_BHK in (q_BHK, k_BHK))
            sums, reference_BH1R = state[..., : v_BHC.shape[-1] + 1, :], None
            if self.gate is not None:
                decay_(sums, self.gate.logs(context.hidden_BLD, context.mask_BL))
            if isinstance(feature_map, ExponentialFeatureMap):
                reference_BH1R = state[..., -1:, :]
                if self.gate is not None:
                    # The reference follows sums below 1 by whole powers of 2, which round nothing.
                    power_BH1R = sums[..., -1:, :].log2().floor_().clamp_(-99, 0)
                    reference_BH1R.add_(power_BH1R)
                    sums.mul_((-power_BH1R).exp2_())
                logits_BH1R = feature_map.key_logits(k_BH1K)
                highest_BH1R = torch.maximum(logits_BH1R, reference_BH1R)
                sums.mul_((reference_BH1R - highest_BH1R).exp2_())
                reference_BH1R.copy_(highest_BH1R)
                phi_k_BH1R = logits_BH1R.sub_(highest_BH1R).exp2_()
            else:
                phi_k_BH1R, _ = feature_map.keys(k_BH1K)
            phi_q_BH1R, _ = feature_map.queries(q_BH1K, reference_BH1R)
            values = torch.cat([v_BHC, torch.ones_like(v_BHC[..., :1])], dim=-1).to(state.dtype)
            sums.addcmul_(values[..., None], phi_k_BH1R)
            out_BH1C, _ = self._normalizer(phi_q_BH1R @ sums.mT)
        return state, out_BH1C[:, :, 0].to(v_BHC.dtype)

    def feature_map(self, dtype: torch.dtype) -> FeatureMap:
        return self._feature_map(None if self.projection is None else self.projection.to(dtype))


def relu_attention(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor, epsilon: float
) -> Tensor:
    """Returns bidirectional attention with φ(x) = relu(x) + ε, as operations for a compiler."""
    dtype = operand_dtype(v_BHLC) or accum_dtype(v_BHLC)
    with no_autocast(v_BHLC):
        q_BHLK, k_BHLK, v_BHLC = (zero_padding(x, mask_BL) for x in (q_BHLK, k_BHLK, v_BHLC))
        phi_q_BHLK = upcast(q_BHLK).relu() + epsilon
        phi_k_BHLK = zero_padding(upcast(k_BHLK).relu() + epsilon, mask_BL)
        state_BHKC = phi_k_BHLK.mT.to(dtype) @ v_BHLC.to(dtype)
        numerator_BHLC = upcast(phi_q_BHLK.to(dtype) @ state_BHKC)
        weight_BHL1 = (phi_q_BHLK * phi_k_BHLK.sum(dim=2, keepdim=True)).sum(dim=-1, keepdim=True)
        sums = torch.cat([numerator_BHLC, weight_BHL1], dim=-1)
        return zero_padding(normalized(sums, _BY_SUM), mask_BL).to(v_BHLC.dtype)


def _refuse_float16(*inputs: Tensor) -> None:
    if any(x.dtype == torch.float16 for x in inputs):
        raise UserError(
            "a Performer cannot run in float16: its features and sums exceed the range of "
            "float16, and gradients become NaN; load with dtype=torch.bfloat16 or float32, or set "
            "trainer.precision=bf16-mixed or 32-true",
            {"compute_dtype": "bfloat16 or float32"},
        )
