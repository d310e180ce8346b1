"""Bidirectional linear attention: O = φ(Q) φ(K)ᵀ[V | 1], normalised (arXiv 2009.14794, eq. 4).

Features exist for a tile at a time and are computed again in the backward pass. Tensors without a
suffix are of a tile's samples, heads and positions; values and sums have the column of the
denominator too, and the state is the sum of [v | 1]ᵀφ(k) over the keys, (C + 1, R) for each head.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.performer.operands import Kernel, Operands, empty_output
from protlm.attention.performer.products import product
from protlm.attention.performer.tiles import Tile, tiles
from protlm.attention.precision import full_precision


class BidirectionalAttention(torch.autograd.Function):
    """`apply(q, k, v, mask, kernel)` returns the output, BHLC, in the dtype of v."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        mask_BL: Tensor,
        kernel: Kernel,
    ) -> Tensor:
        """Sums [v | 1]ᵀφ(k) over each sequence, then lets every query read the sum."""
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL)
        out_BHLC = empty_output(v_BHLC)
        saved_BHL1 = torch.empty_like(v_BHLC[..., :1], dtype=operands.dtype)
        states = []
        groups = list(tiles(q_BHLK, num_features=kernel.num_features))
        with full_precision(v_BHLC):
            for group in groups:
                state = _state(operands, kernel, group[0])
                for tile in group[1:]:
                    state += _state(operands, kernel, tile)
                for tile in group:
                    phi = kernel.feature_map.queries(operands.queries(tile)).phi_BHLR
                    normalized = kernel.normalizer(product(phi, state))
                    tile.of(out_BHLC)[:], tile.of(saved_BHL1)[:] = normalized
                    operands.clear_padding(tile.of(out_BHLC), tile)
                states.append(state)
        ctx.kernel, ctx.groups = kernel, groups
        ctx.save_for_backward(
            q_BHLK, k_BHLK, v_BHLC, mask_BL, kernel.projection_RK, out_BHLC, saved_BHL1, *states
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
        q_BHLK, k_BHLK, v_BHLC, mask_BL, _, out_BHLC, saved_BHL1, *states = ctx.saved_tensors
        kernel, operands = ctx.kernel, Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL)
        dq_BHLK, dk_BHLK, dv_BHLC = (torch.empty_like(x) for x in (q_BHLK, k_BHLK, v_BHLC))
        with full_precision(out_BHLC):
            for group, state in zip(ctx.groups, states, strict=True):
                dstate = torch.zeros_like(state)
                for tile in group:
                    dsums = kernel.normalizer.gradient(
                        tile.of(dout_BHLC),
                        tile.of(out_BHLC).to(operands.dtype),
                        tile.of(saved_BHL1),
                    )
                    operands.clear_padding(dsums, tile)
                    phi, pullback = kernel.feature_map.queries(operands.queries(tile))
                    dstate += product(dsums.mT.contiguous(), phi.mT)
                    tile.of(dq_BHLK)[:] = pullback(product(dsums, state.mT))
                dvalues, dones = dstate[..., :-1, :], dstate[..., -1, :]
                for tile in group:
                    phi, pullback = kernel.feature_map.keys(operands.keys(tile))
                    tile.of(dv_BHLC)[:] = product(phi, dvalues)
                    dphi = product(operands.values(tile), dvalues.mT, dones)
                    tile.of(dk_BHLK)[:] = pullback(dphi)
                    for gradient in (dk_BHLK, dv_BHLC):
                        operands.clear_padding(tile.of(gradient), tile)
        return dq_BHLK, dk_BHLK, dv_BHLC, None, None


def _state(operands: Operands, kernel: Kernel, tile: Tile) -> Tensor:
    phi = kernel.feature_map.keys(operands.keys(tile)).phi_BHLR
    return product(operands.transposed_values_and_ones(tile), phi.mT)
