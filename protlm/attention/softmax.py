"""Exact softmax attention: softmax(q kᵀ / √K) v (Vaswani et al., arXiv 1706.03762, eq. 1)."""

import math
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.base import Attention, Context, QueryKeyNorms, Recurrent
from protlm.attention.ops.key_value_cache import KeyValueCache
from protlm.attention.ops.numerics import padding_bias, softmax_weights, visible_keys, zero_padding

# Initial capacity of a cache, in positions.
_ROOM = 64


@final
class Softmax(Attention, Recurrent[KeyValueCache]):
    """Exact attention by torch's fused kernels: time grows with L², memory with L."""

    cost: ClassVar[str] = "L² K"
    advice: ClassVar[str] = "short proteins, and the reference for all others; exact maps"

    def __init__(self, *, bounded_qk_norm: bool = False) -> None:
        super().__init__()
        if bounded_qk_norm:
            self.qk_norm = QueryKeyNorms.bounded

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        _, mask_BL, causal = context
        # This would synchronize with a GPU, and break a compiled graph.
        may_look = mask_BL.device.type == "cpu" and not torch.compiler.is_compiling()
        is_whole = may_look and bool(mask_BL.all())
        if not is_whole:
            q_BHLK, k_BHLK, v_BHLC = (zero_padding(x, mask_BL) for x in (q_BHLK, k_BHLK, v_BHLC))
        if is_whole:
            out_BHLC = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLC, is_causal=causal)
        else:
            out_BHLC = _biased_by_a_coordinate(q_BHLK, k_BHLK, v_BHLC, mask_BL, causal)
        out_BHLC = out_BHLC.to(v_BHLC.dtype)
        return out_BHLC if is_whole else zero_padding(out_BHLC, mask_BL)

    def map_rows(self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, rows: slice) -> Tensor:
        _, mask_BL, causal = context
        q_BHMK, k_BHLK = zero_padding(q_BHLK, mask_BL)[:, :, rows], zero_padding(k_BHLK, mask_BL)
        return softmax_weights(q_BHMK, k_BHLK, visible_keys(mask_BL, rows, causal=causal))

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> KeyValueCache:
        return KeyValueCache.empty(k_BHK, v_BHC, _ROOM)

    def step(
        self,
        state: KeyValueCache,
        q_BHK: Tensor,
        k_BHK: Tensor,
        v_BHC: Tensor,
        *,
        hidden_BD: Tensor,
    ) -> tuple[KeyValueCache, Tensor]:
        state = state.append(k_BHK, v_BHC, slot=state.length)
        return state, state.attend(q_BHK)


def _biased_by_a_coordinate(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor, causal: bool
) -> Tensor:
    """Hides padded keys by an additional coordinate: 1 in a query, very negative in such a key.

    The fused kernels accept a mask or causality, not both, and one mask for both would be L×L. All
    three tensors get one width, a multiple of 8, without which CUDA falls back to a kernel that
    builds the L×L map.
    """
    num_values = v_BHLC.shape[-1]
    width = -(-max(q_BHLK.shape[-1] + 1, num_values) // 8) * 8
    bias_BL = padding_bias(mask_BL, k_BHLK.dtype)
    bias_BHL1 = bias_BL[:, None, :, None].expand_as(k_BHLK[..., :1])
    q, k = F.pad(q_BHLK, (0, 1), value=1.0), torch.cat([k_BHLK, bias_BHL1], dim=-1)
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v_BHLC))
    scale = 1 / math.sqrt(q_BHLK.shape[-1])
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)[..., :num_values]
