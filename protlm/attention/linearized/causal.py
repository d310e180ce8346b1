"""Causal linear attention in chunks: O_i = φ(q_i) Σ_{j≤i} φ(k_j)ᵀ[v_j | 1] (2009.14794, B.1).

Within a chunk of 64 positions the weights are a masked 64×64 product; between chunks, prefix sums
of [v | 1]ᵀφ(k), the states. A tile of chunks is computed at a time. Only the state before each
tile is kept; features and the states within a tile are recomputed in the backward pass. Nothing is
ever subtracted from a state, so that later positions do not affect earlier ones, not even by
rounding. The exceptions are NaN and infinities, which affect their whole chunk, since 0·NaN is NaN.

Tensors without a suffix are (B, H, chunks, 64, width), states (B, H, chunks, C + 1, R).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.linearized.chunks import Chunks, chunked, positions
from protlm.attention.linearized.operands import Kernel, Operands, empty_output
from protlm.attention.linearized.states import States
from protlm.attention.ops.numerics import no_autocast
from protlm.attention.ops.tiles import tiles

# The state of a chunk, its gradient and their increments are as large as its features.
_MEMORY_DIVISOR = 2


class CausalAttention(torch.autograd.Function):
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
        """Computes the tiles from left to right, carrying the state."""
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL)
        out_BHLC = empty_output(v_BHLC)
        saved_BHL1 = torch.empty_like(v_BHLC[..., :1], dtype=operands.dtype)
        states, has_rises = [], []
        groups = list(
            tiles(q_BHLK, num_features=kernel.num_features, memory_divisor=_MEMORY_DIVISOR)
        )
        with no_autocast(v_BHLC):
            for group in groups:
                prefix = States()
                reference: Tensor | None = None
                for tile in group:
                    if prefix.last is not None:
                        states.append(_joined(prefix.last, reference))
                    chunks = Chunks.of(operands, kernel, tile, reference)
                    before = prefix.add_products(
                        chunks.values.mT,
                        chunks.state_keys(),
                        chunks.factors(),
                        dtype=chunks.dtype,
                    )
                    has_rises.append(chunks.rises is not None)
                    reference = chunks.reference
                    sums = chunks.product(chunks.phi_q, before.mT)
                    sums = chunks.product(chunks.weights(), chunks.values, onto=sums)
                    normalized = kernel.normalizer(positions(sums, tile))
                    tile.of(out_BHLC)[:], tile.of(saved_BHL1)[:] = normalized
                    operands.clear_padding(tile.of(out_BHLC), tile)
        ctx.kernel, ctx.groups, ctx.has_rises = kernel, groups, has_rises
        ctx.save_for_backward(
            q_BHLK, k_BHLK, v_BHLC, mask_BL, kernel.projection_RK, out_BHLC, saved_BHL1, *states
        )
        return out_BHLC

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Computes the tiles from right to left, carrying the gradient of the state."""
        (dout_BHLC,) = grad_outputs
        # Accessed once: activation checkpointing does not allow a second access.
        q_BHLK, k_BHLK, v_BHLC, mask_BL, _, out_BHLC, saved_BHL1, *states = ctx.saved_tensors
        kernel, operands = ctx.kernel, Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL)
        dq_BHLK, dk_BHLK, dv_BHLC = (torch.empty_like(x) for x in (q_BHLK, k_BHLK, v_BHLC))
        has_rises = list(ctx.has_rises)
        with no_autocast(out_BHLC):
            for group in reversed(ctx.groups):
                prefix, suffix = States(), States(reverse=True)
                for tile in reversed(group):
                    saved = states.pop() if tile is not group[0] else None
                    prefix.last, reference = _split(saved, v_BHLC.shape[-1] + 1)
                    chunks = Chunks.of(operands, kernel, tile, reference, has_rises=has_rises.pop())
                    dsums = kernel.normalizer.gradient(
                        tile.of(dout_BHLC),
                        tile.of(out_BHLC).to(operands.dtype),
                        tile.of(saved_BHL1),
                    )
                    operands.clear_padding(dsums, tile)
                    gradients = _chunk_gradients(chunks, chunked(dsums), prefix, suffix)
                    dphi_q, dphi_k, dvalues = (positions(g, tile) for g in gradients)
                    tile.of(dq_BHLK)[:] = chunks.query_pullback(dphi_q)
                    tile.of(dk_BHLK)[:] = chunks.key_pullback(dphi_k)
                    tile.of(dv_BHLC)[:] = dvalues[..., :-1]
                    operands.clear_padding(tile.of(dv_BHLC), tile)
        return dq_BHLK, dk_BHLK, dv_BHLC, None, None


def _joined(state: Tensor, reference: Tensor | None) -> Tensor:
    """Copies a state, with the reference of its features as its last row."""
    # The next tile overwrites the state.
    return state.clone() if reference is None else torch.cat([state, reference], dim=-2)


def _split(saved: Tensor | None, num_rows: int) -> tuple[Tensor | None, Tensor | None]:
    """Inverts `_joined`."""
    if saved is None or saved.shape[-2] == num_rows:
        return saved, None
    return saved[..., :num_rows, :], saved[..., num_rows:, :]


def _chunk_gradients(
    chunks: Chunks, dsums: Tensor, prefix: States, suffix: States
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the arguments of the pullbacks of queries and keys, and the gradient of [v | 1]."""
    state_keys, factors = chunks.state_keys(), chunks.factors()
    before = prefix.add_products(chunks.values.mT, state_keys, factors, dtype=chunks.dtype)
    dafter = suffix.add_products(dsums.mT, chunks.phi_q, factors, dtype=chunks.dtype)
    dweights = chunks.product(dsums, chunks.values.mT).tril_()
    dqueries, dkeys = chunks.feature_gradients(
        dweights, chunks.product(dsums, before), chunks.product(chunks.values, dafter)
    )
    onto = chunks.product(state_keys, dafter.mT)
    return dqueries, dkeys, chunks.product(chunks.weights().mT, dsums, onto=onto)
