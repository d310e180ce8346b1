"""Bidirectional linear attention: O = φ(Q) φ(K)ᵀ[V | 1], normalised (arXiv 2009.14794, eq. 4).

Features exist for a block of rows at a time and are computed again in the backward pass. Tensors
without a suffix have the column of the denominator too: sums are (B, H, L, C + 1), the state
(B, H, R, C + 1).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.performer.features import FeatureMaps
from protlm.attention.performer.operands import (
    Operands,
    full_precision,
    normalize,
    row_blocks,
    sums_gradient,
)


class BidirectionalAttention(torch.autograd.Function):
    """`apply(q, k, v, mask, projection, maps)` returns the output, BHLC, in the dtype of v."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        mask_BL: Tensor,
        projection_RK: Tensor | None,
        maps: FeatureMaps,
    ) -> Tensor:
        """Sums φ(k)ᵀ[v | 1] over the sequence, then lets every query read the sum."""
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL, projection_RK, maps)
        blocks = row_blocks(v_BHLC.shape[2])
        out_BHLC = torch.empty_like(v_BHLC)
        inverse_BHL1 = torch.empty_like(v_BHLC[..., :1], dtype=operands.dtype)
        with full_precision(v_BHLC):
            state = operands.key_features(blocks[0]).mT @ operands.values(blocks[0])
            for rows in blocks[1:]:
                state += operands.key_features(rows).mT @ operands.values(rows)
            for rows in blocks:
                sums = operands.query_features(rows) @ state
                out_BHLC[:, :, rows], inverse_BHL1[:, :, rows] = normalize(sums)
        ctx.maps = maps
        ctx.save_for_backward(
            q_BHLK, k_BHLK, v_BHLC, mask_BL, projection_RK, out_BHLC, inverse_BHL1, state
        )
        return out_BHLC

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Walks the queries for dq and the gradient of the sum, then the keys for dk and dv."""
        (dout_BHLC,) = grad_outputs
        # Once only: activation checkpointing refuses a second look.
        *inputs, out_BHLC, inverse_BHL1, state = ctx.saved_tensors
        q_BHLK, k_BHLK, v_BHLC, mask_BL, projection_RK = inputs
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL, projection_RK, ctx.maps)
        dq_BHLK, dk_BHLK, dv_BHLC = (torch.empty_like(x) for x in (q_BHLK, k_BHLK, v_BHLC))
        dstate = torch.zeros_like(state)
        blocks = row_blocks(out_BHLC.shape[2])
        with full_precision(out_BHLC):
            for rows in blocks:
                dsums = sums_gradient(
                    dout_BHLC[:, :, rows], out_BHLC[:, :, rows], inverse_BHL1[:, :, rows]
                )
                phi_BHMR = operands.query_features(rows)
                dphi_BHMR = dsums @ state.mT
                dq_BHLK[:, :, rows] = operands.query_gradient(dphi_BHMR, phi_BHMR, rows)
                dstate += phi_BHMR.mT @ dsums
            for rows in blocks:
                phi_BHMR = operands.key_features(rows)
                dphi_BHMR = operands.values(rows) @ dstate.mT
                dk_BHLK[:, :, rows] = operands.key_gradient(dphi_BHMR, phi_BHMR, rows)
                dv_BHLC[:, :, rows] = (phi_BHMR @ dstate)[..., :-1]
        return dq_BHLK, dk_BHLK, dv_BHLC, None, None, None
