"""Exact softmax attention: softmax(q kᵀ / √K) v (Vaswani et al., arXiv 1706.03762, eq. 1)."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.base import Context, QueryKeyNorms, Recurrent
from protlm.attention.ops.key_value_cache import KeyValueCache
from protlm.attention.ops.numerics import (
    at_once,
    not_compiled,
    padding_bias,
    recomputed,
    softmax_weights,
    visible_keys,
    zero_padding,
)
from protlm.attention.ops.varlen import varlen_softmax
from protlm.attention.relatives import SeesRelatives, View
from protlm.bounds import Bounds

# Initial capacity of a cache, in positions.
_ROOM = 64
# Biases of pairs that are in memory at a time, 256 MiB in float32.
_BIASES = 1 << 26
# Rows at a time: with more, the memory of short proteins, from which that of long ones is
# estimated, would grow with the square of the length.
_ROWS = 512


@final
class Softmax(SeesRelatives, Recurrent[KeyValueCache]):
    """Exact attention by torch's fused kernels: time grows with L², memory with L."""

    is_linear: ClassVar[bool] = False
    rounded_by_autocast: ClassVar[bool] = True
    cost: ClassVar[str] = "L² K"
    advice: ClassVar[str] = "short proteins, and the reference for all others; exact maps"
    takes_bias: ClassVar[bool] = True
    exports = True

    def __init__(self, *, bounded_qk_norm: bool = False) -> None:
        super().__init__()
        if bounded_qk_norm:
            self.qk_norm = QueryKeyNorms.bounded

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        mask_BL, causal = context.mask_BL, context.causal
        num_values, scale = v_BHLC.shape[-1], 1 / math.sqrt(q_BHLK.shape[-1])
        # This would synchronize with a GPU, and break a compiled graph.
        may_look = mask_BL.device.type == "cpu" and not torch.compiler.is_compiling()
        is_whole = context.is_whole or (may_look and bool(mask_BL.all()))
        q, k, v = q_BHLK, k_BHLK, v_BHLC
        if not is_whole:
            q, k, v = _with_a_coordinate(*(zero_padding(x, mask_BL) for x in (q, k, v)), mask_BL)
        if context.logit_bias is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        else:
            bias = partial(context.logit_bias, mask_BL.shape[1])
            out = _biased(q, k, v, bias, scale=scale, causal=causal)
        out_BHLC = out[..., :num_values].to(v_BHLC.dtype)
        return out_BHLC if is_whole else zero_padding(out_BHLC, mask_BL)

    def forward_packed(self, heads: Sequence[Tensor], context: Context, bounds: Bounds) -> Tensor:
        out_BHLC, window = None, (-1, 0) if context.causal else (-1, -1)
        if context.logit_bias is None:
            out_BHLC = varlen_softmax(heads, context.mask_BL, bounds, window)
        if out_BHLC is not None:
            return out_BHLC
        if heads[0].device.type != "cpu":
            return super().forward_packed(heads, context, bounds)
        return self._one_by_one(heads, context, bounds)

    @not_compiled
    def _one_by_one(self, heads: Sequence[Tensor], context: Context, bounds: Bounds) -> Tensor:
        """Attends in each protein where it lies: nothing is copied, padded or hidden."""
        pieces, places = bounds.pieces(heads)
        outs = [torch.zeros_like(v) for _, _, v in pieces]
        for place in places:
            q, k, v = pieces[place]
            within = context._replace(mask_BL=context.mask_BL.new_ones(1, v.shape[2]))
            outs[place] = self.mix(q, k, v, within)
        return torch.cat(outs, dim=2)

    def relatives_refusal(self, *, later: bool, apart: bool, runs: bool) -> str:
        if not (later and apart):
            return ""
        return (
            "softmax over relatives on both sides alone is not computed: type "
            "model.relatives_sum=joint, or model.relatives=ordered"
        )

    @not_compiled
    def across(
        self, heads: Sequence[Tensor], context: Context, view: View, *, own: bool
    ) -> tuple[Tensor, KeyValueCache | None]:
        assert not view.later, "relatives on both sides of a protein are not one slice"
        pieces, places = view.bounds.pieces([x.to(heads[2].dtype) for x in heads])
        outs, cache = [torch.zeros_like(v) for _, _, v in pieces], None
        before, num_before = view.entering, 0
        if before is not None:
            before = [x[:, :, : before.length] for x in (before.k_BHMK, before.v_BHMC)]
            num_before = before[0].shape[2]
        for family in view.bounds.members:
            # What proteins see are slices of one tensor: each would keep a copy for its gradient.
            both = [torch.cat([pieces[place][n] for place in places[family]], 2) for n in (1, 2)]
            if before is not None:
                both = [torch.cat(x, dim=2) for x in zip(before, both, strict=True)]
            end = num_before
            for place in places[family]:
                q_BHLK = pieces[place][0]
                start, end = end, end + q_BHLK.shape[2]
                seen = [x[:, :, : end if own else start] for x in both]
                if seen[0].shape[2]:
                    outs[place] = _after_others(q_BHLK, *seen, causal=own and context.causal)
            if view.keeps:
                cache = KeyValueCache(both[0], both[1], end)
        return torch.cat(outs, dim=2), cache

    def map_rows(self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, rows: slice) -> Tensor:
        mask_BL, causal = context.mask_BL, context.causal
        q_BHMK, k_BHLK = zero_padding(q_BHLK, mask_BL)[:, :, rows], zero_padding(k_BHLK, mask_BL)
        bias = context.logit_bias
        bias_HML = None if bias is None else bias(mask_BL.shape[1], rows)
        return softmax_weights(q_BHMK, k_BHLK, visible_keys(mask_BL, rows, causal=causal), bias_HML)

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> KeyValueCache:
        return KeyValueCache.empty(k_BHK, v_BHC, _ROOM)

    def step(
        self,
        state: KeyValueCache,
        q_BHK: Tensor,
        k_BHK: Tensor,
        v_BHC: Tensor,
        context: Context,
    ) -> tuple[KeyValueCache, Tensor]:
        state = state.append(k_BHK, v_BHC, slot=state.length)
        bias_H1M, length = None, state.length
        if context.logit_bias is not None:
            bias_H1M = context.logit_bias(length, slice(length - 1, length)).to(k_BHK.dtype)
        return state, state.attend(q_BHK, bias_H1M)


def _after_others(q_BHLK: Tensor, k_BHMK: Tensor, v_BHMC: Tensor, *, causal: bool) -> Tensor:
    """Attends to M positions, of which the last L are those of the queries if causal."""
    scale, (length, total) = 1 / math.sqrt(q_BHLK.shape[-1]), (q_BHLK.shape[2], k_BHMK.shape[2])
    if not causal:
        return F.scaled_dot_product_attention(q_BHLK, k_BHMK, v_BHMC, scale=scale)
    sees = torch.ones(length, total, dtype=torch.bool, device=q_BHLK.device).tril(total - length)
    return F.scaled_dot_product_attention(q_BHLK, k_BHMK, v_BHMC, sees, scale=scale)


def _with_a_coordinate(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor
) -> tuple[Tensor, ...]:
    """Hides padded keys by an additional coordinate: 1 in a query, very negative in such a key.

    The fused kernels accept a mask or causality, not both, and one mask for both would be L×L. All
    three tensors get one width, a multiple of 8, without which CUDA falls back to a kernel that
    builds the L×L map.
    """
    width = -(-max(q_BHLK.shape[-1] + 1, v_BHLC.shape[-1]) // 8) * 8
    bias_BHL1 = padding_bias(mask_BL, k_BHLK.dtype)[:, None, :, None].expand_as(k_BHLK[..., :1])
    q, k = F.pad(q_BHLK, (0, 1), value=1.0), torch.cat([k_BHLK, bias_BHL1], dim=-1)
    return tuple(F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v_BHLC))


def _biased(
    q: Tensor, k: Tensor, v: Tensor, bias: Callable[[slice], Tensor], *, scale: float, causal: bool
) -> Tensor:
    """Attends in blocks of queries, whose biases are in memory at a time."""

    def attend(rows: slice) -> Tensor:
        bias_1HML = bias(rows)[None].to(q.dtype)
        if causal:
            is_later = torch.ones_like(bias_1HML, dtype=torch.bool).triu(rows.start + 1)
            bias_1HML = bias_1HML.masked_fill(is_later, -math.inf)
        return F.scaled_dot_product_attention(q[:, :, rows], k, v, bias_1HML, scale=scale)

    _, num_heads, length, _ = q.shape
    size = min(at_once(q, num_heads * length, cpu=_BIASES, gpu=_BIASES), _ROWS)
    run = partial(recomputed, attend) if torch.is_grad_enabled() else attend
    return torch.cat([run(slice(start, start + size)) for start in range(0, length, size)], dim=2)
