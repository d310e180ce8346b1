"""Exact softmax attention: softmax(q kᵀ / √K) v (Vaswani et al., arXiv 1706.03762, eq. 1)."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.base import Attention, Recurrent
from protlm.attention.masking import visible_keys, zero_padding

# Positions a cache has room for at first.
_ROOM = 64


@final
@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of the first `length` positions; the rest of M is room for more."""

    k_BHMK: Tensor
    v_BHMC: Tensor
    length: int

    def __getitem__(self, rows_B: Tensor) -> "KeyValueCache":
        """See `State`."""
        return replace(self, k_BHMK=self.k_BHMK[rows_B], v_BHMC=self.v_BHMC[rows_B])

    def append(self, k_BHK: Tensor, v_BHC: Tensor) -> "KeyValueCache":
        """Writes one position, in place while there is room."""
        k_BHMK, v_BHMC, room = self.k_BHMK, self.v_BHMC, self.k_BHMK.shape[2]
        if self.length == room:
            # Doubling copies every position about once, however long the sequence becomes.
            k_BHMK, v_BHMC = (F.pad(x, (0, 0, 0, room)) for x in (k_BHMK, v_BHMC))
        k_BHMK[:, :, self.length] = k_BHK
        v_BHMC[:, :, self.length] = v_BHC
        return KeyValueCache(k_BHMK, v_BHMC, self.length + 1)


@final
class Softmax(Attention, Recurrent[KeyValueCache]):
    """Exact attention by torch's fused kernels: time grows with L², memory with L."""

    supports_bidirectional = True
    supports_causal = True
    cost: ClassVar[str] = "L² K"
    advice: ClassVar[str] = "short proteins, and the measure of all others; exact maps"

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
        """See `Attention.forward`."""
        # The fused kernels take a mask or causality, not both, and one mask for both would be
        # L×L. So the key mask is one more coordinate: 1 in a query, far below any logit in a
        # padded key. All three get one width, a multiple of 8, without which CUDA's fused kernels
        # would leave the work to one that builds L×L.
        bias_BHL1 = torch.zeros_like(k_BHLK[..., :1]).masked_fill(
            ~mask_BL[:, None, :, None], torch.finfo(k_BHLK.dtype).min / 2
        )
        num_values = v_BHLC.shape[-1]
        width = -(-max(q_BHLK.shape[-1] + 1, num_values) // 8) * 8
        q = F.pad(zero_padding(q_BHLK, mask_BL), (0, 1), value=1.0)
        k = torch.cat([zero_padding(k_BHLK, mask_BL), bias_BHL1], dim=-1)
        v = zero_padding(v_BHLC, mask_BL)
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        wide = F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=causal,
            scale=1 / math.sqrt(q_BHLK.shape[-1]),
        )
        return zero_padding(wide[..., :num_values].to(v_BHLC.dtype), mask_BL)

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
        """The map or a block of its rows, in float32 (float64 for float64 queries)."""
        rows = slice(None) if rows is None else rows
        dtype = torch.promote_types(q_BHLK.dtype, torch.float32)
        q_BHMK = zero_padding(q_BHLK, mask_BL)[:, :, rows].to(dtype)
        visible_B1ML = visible_keys(mask_BL, rows, causal=causal)
        with torch.autocast(q_BHLK.device.type, enabled=False):
            logits_BHML = q_BHMK @ zero_padding(k_BHLK, mask_BL).to(dtype).mT
        logits_BHML = logits_BHML / math.sqrt(q_BHLK.shape[-1])
        # A finite floor, so that a row that sees nothing is 0 below and not NaN.
        floor = torch.finfo(dtype).min
        weights_BHML = logits_BHML.masked_fill(~visible_B1ML, floor).softmax(dim=-1)
        return weights_BHML.masked_fill(~visible_B1ML, 0)

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> KeyValueCache:
        """See `Recurrent.initial_state`."""
        k_BHMK, v_BHMC = (x.new_zeros(*x.shape[:2], _ROOM, x.shape[2]) for x in (k_BHK, v_BHC))
        return KeyValueCache(k_BHMK, v_BHMC, length=0)

    def step(
        self,
        state: KeyValueCache,
        q_BHK: Tensor,
        k_BHK: Tensor,
        v_BHC: Tensor,
        *,
        hidden_BD: Tensor,
    ) -> tuple[KeyValueCache, Tensor]:
        """See `Recurrent.step`; time and memory grow with the number of positions before."""
        state = state.append(k_BHK, v_BHC)
        out_BH1C = F.scaled_dot_product_attention(
            q_BHK[:, :, None],
            state.k_BHMK[:, :, : state.length],
            state.v_BHMC[:, :, : state.length],
            scale=1 / math.sqrt(q_BHK.shape[-1]),
        )
        return state, out_BH1C.squeeze(2).to(v_BHC.dtype)
