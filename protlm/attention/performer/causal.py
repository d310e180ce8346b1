"""Causal linear attention in chunks: O_i = φ(q_i) Σ_{j≤i} φ(k_j)ᵀ[v_j | 1] (2009.14794, B.1).

Within a chunk of 64 positions the weights are a masked 64×64 product; between chunks, prefix sums
of φ(k)ᵀ[v | 1], the states. A block of chunks is computed at a time. Only the state before each
block is kept; features and the states within are computed again in the backward pass. Nothing is
ever subtracted from a state, so nothing of the future is left in it, not even a rounding error.

Tensors without a suffix are (B, H, chunks, 64, width), states (B, H, chunks, R, C + 1).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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

_CHUNK = 64


class CausalAttention(torch.autograd.Function):
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
        """Walks the blocks from left to right, carrying the state."""
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL, projection_RK, maps)
        out_BHLC = torch.empty_like(v_BHLC)
        inverse_BHL1 = torch.empty_like(v_BHLC[..., :1], dtype=operands.dtype)
        states = [torch.zeros(1, 1, 1, 1, dtype=operands.dtype, device=v_BHLC.device)]
        with full_precision(v_BHLC):
            for rows in row_blocks(v_BHLC.shape[2]):
                block = _Block.of(operands, rows)
                before, state = _prefix_sums(block.phi_k.mT @ block.values, states[-1])
                sums = block.phi_q @ before + block.weights() @ block.values
                normalized = normalize(_positions(sums, rows))
                out_BHLC[:, :, rows], inverse_BHL1[:, :, rows] = normalized
                states.append(state)
        ctx.maps = maps
        ctx.save_for_backward(
            q_BHLK, k_BHLK, v_BHLC, mask_BL, projection_RK, out_BHLC, inverse_BHL1, *states[:-1]
        )
        return out_BHLC

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Walks the blocks from right to left, carrying the gradient of the state."""
        (dout_BHLC,) = grad_outputs
        # Once only: activation checkpointing refuses a second look.
        saved = ctx.saved_tensors
        q_BHLK, k_BHLK, v_BHLC, mask_BL, projection_RK, out_BHLC, inverse_BHL1, *states = saved
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL, projection_RK, ctx.maps)
        dq_BHLK, dk_BHLK, dv_BHLC = (torch.empty_like(x) for x in (q_BHLK, k_BHLK, v_BHLC))
        dstate = torch.zeros_like(states[0])
        blocks = row_blocks(out_BHLC.shape[2])
        with full_precision(out_BHLC):
            for rows, state in zip(reversed(blocks), reversed(states), strict=True):
                block = _Block.of(operands, rows)
                dsums = sums_gradient(
                    dout_BHLC[:, :, rows], out_BHLC[:, :, rows], inverse_BHL1[:, :, rows]
                )
                gradients, dstate = _block_gradients(block, _chunks(dsums), state, dstate)
                dphi_q, dphi_k, dv_BHLC[:, :, rows] = (_positions(g, rows) for g in gradients)
                phi_q, phi_k = _positions(block.phi_q, rows), _positions(block.phi_k, rows)
                dq_BHLK[:, :, rows] = operands.query_gradient(dphi_q, phi_q, rows)
                dk_BHLK[:, :, rows] = operands.key_gradient(dphi_k, phi_k, rows)
        return dq_BHLK, dk_BHLK, dv_BHLC, None, None, None


class _Block(NamedTuple):
    """Features and [v | 1] of some chunks."""

    phi_q: Tensor
    phi_k: Tensor
    values: Tensor

    @classmethod
    def of(cls, operands: Operands, rows: slice) -> "_Block":
        return cls(
            phi_q=_chunks(operands.query_features(rows)),
            phi_k=_chunks(operands.key_features(rows)),
            values=_chunks(operands.values(rows)),
        )

    def weights(self) -> Tensor:
        """The unnormalised weights within each chunk."""
        return (self.phi_q @ self.phi_k.mT).tril()


def _block_gradients(
    block: _Block, dsums: Tensor, state: Tensor, dstate: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The gradients of φ(q), φ(k) and v, and that of the state before the block."""
    before, _ = _prefix_sums(block.phi_k.mT @ block.values, state)
    dafter, dstate = _prefix_sums((block.phi_q.mT @ dsums).flip(2), dstate)
    dafter = dafter.flip(2)
    dweights = (dsums @ block.values.mT).tril()
    dphi_q = dsums @ before.mT + dweights @ block.phi_k
    dphi_k = block.values @ dafter.mT + dweights.mT @ block.phi_q
    dvalues = block.phi_k @ dafter + block.weights().mT @ dsums
    return (dphi_q, dphi_k, dvalues[..., :-1]), dstate


def _prefix_sums(increments: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The states before each chunk and after the last, from the state before the first."""
    cumulative = F.pad(increments, (0, 0, 0, 0, 1, 0)).cumsum(dim=2) + state[:, :, None]
    return cumulative[:, :, :-1], cumulative[:, :, -1]


def _chunks(x_BHLR: Tensor) -> Tensor:
    """Cuts positions into chunks, the last one filled up with zeros."""
    missing = -x_BHLR.shape[2] % _CHUNK
    return F.pad(x_BHLR, (0, 0, 0, missing)).unflatten(2, (-1, _CHUNK))


def _positions(chunks: Tensor, rows: slice) -> Tensor:
    """Undoes `_chunks`."""
    return chunks.flatten(2, 3)[:, :, : rows.stop - rows.start]
