"""Causal linear attention in chunks: O_i = φ(q_i) Σ_{j≤i} φ(k_j)ᵀ[v_j | 1] (2009.14794, B.1).

Within a chunk of 64 positions the weights are a masked 64×64 product; between chunks, prefix sums
of [v | 1]ᵀφ(k), the states. A tile of chunks is computed at a time. Only the state before each
tile is kept; features and the states within are computed again in the backward pass. Nothing is
ever subtracted from a state, so nothing of the future is left in it, not even a rounding error, as
long as it is finite: within its chunk a NaN or an infinity reaches all, since 0·NaN is NaN.

Tensors without a suffix are (B, H, chunks, 64, width), states (B, H, chunks, C + 1, R).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.performer.features import Pullback
from protlm.attention.performer.operands import Kernel, Operands, empty_output
from protlm.attention.performer.states import States
from protlm.attention.performer.tiles import CHUNK, Tile, tiles
from protlm.attention.precision import full_precision

# A chunk's state, its gradient and their increments are as large as the features of the chunk.
_SHARE = 2


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
        """Walks the tiles from left to right, carrying the state."""
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL)
        out_BHLC = empty_output(v_BHLC)
        saved_BHL1 = torch.empty_like(v_BHLC[..., :1], dtype=operands.dtype)
        states = []
        groups = list(tiles(q_BHLK, num_features=kernel.num_features, share=_SHARE))
        with full_precision(v_BHLC):
            for group in groups:
                prefix = States()
                for tile in group:
                    if prefix.last is not None:
                        states.append(prefix.last.clone())
                    chunks = _Chunks.of(operands, kernel, tile)
                    before = prefix.add_products(chunks.values.mT, chunks.phi_k)
                    sums = _product(chunks.phi_q, before.mT)
                    sums = _product(chunks.weights(), chunks.values, onto=sums)
                    normalized = kernel.normalizer(_positions(sums, tile))
                    tile.of(out_BHLC)[:], tile.of(saved_BHL1)[:] = normalized
                    operands.clear_padding(tile.of(out_BHLC), tile)
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
        """Walks the tiles from right to left, carrying the gradient of the state."""
        (dout_BHLC,) = grad_outputs
        # Once only: activation checkpointing refuses a second look.
        q_BHLK, k_BHLK, v_BHLC, mask_BL, _, out_BHLC, saved_BHL1, *states = ctx.saved_tensors
        kernel, operands = ctx.kernel, Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL)
        dq_BHLK, dk_BHLK, dv_BHLC = (torch.empty_like(x) for x in (q_BHLK, k_BHLK, v_BHLC))
        with full_precision(out_BHLC):
            for group in reversed(ctx.groups):
                prefix, suffix = States(), States(reverse=True)
                for tile in reversed(group):
                    prefix.last = states.pop() if tile is not group[0] else None
                    chunks = _Chunks.of(operands, kernel, tile)
                    dsums = kernel.normalizer.gradient(
                        tile.of(dout_BHLC),
                        tile.of(out_BHLC).to(operands.dtype),
                        tile.of(saved_BHL1),
                    )
                    operands.clear_padding(dsums, tile)
                    gradients = _chunk_gradients(chunks, _chunked(dsums), prefix, suffix)
                    dphi_q, dphi_k, dvalues = (_positions(g, tile) for g in gradients)
                    tile.of(dq_BHLK)[:] = chunks.query_pullback(dphi_q)
                    tile.of(dk_BHLK)[:] = chunks.key_pullback(dphi_k)
                    tile.of(dv_BHLC)[:] = dvalues[..., :-1]
                    operands.clear_padding(tile.of(dv_BHLC), tile)
        return dq_BHLK, dk_BHLK, dv_BHLC, None, None


class _Chunks(NamedTuple):
    """Features and [v | 1] of the chunks of a tile."""

    phi_q: Tensor
    phi_k: Tensor
    values: Tensor
    query_pullback: Pullback
    key_pullback: Pullback

    @classmethod
    def of(cls, operands: Operands, kernel: Kernel, tile: Tile) -> "_Chunks":
        phi_q, query_pullback = kernel.feature_map.queries(operands.queries(tile))
        phi_k, key_pullback = kernel.feature_map.keys(operands.keys(tile))
        return cls(
            phi_q=_chunked(phi_q),
            phi_k=_chunked(phi_k),
            values=_chunked(operands.values_and_ones(tile)),
            query_pullback=query_pullback,
            key_pullback=key_pullback,
        )

    def weights(self) -> Tensor:
        """The unnormalised weights within each chunk."""
        return _product(self.phi_q, self.phi_k.mT).tril_()


def _chunk_gradients(
    chunks: _Chunks, dsums: Tensor, prefix: States, suffix: States
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of φ(q), φ(k) and [v | 1]."""
    before = prefix.add_products(chunks.values.mT, chunks.phi_k)
    dafter = suffix.add_products(dsums.mT, chunks.phi_q)
    dweights = _product(dsums, chunks.values.mT).tril_()
    dphi_q = _product(dweights, chunks.phi_k, onto=_product(dsums, before))
    dphi_k = _product(dweights.mT, chunks.phi_q, onto=_product(chunks.values, dafter))
    dvalues = _product(chunks.weights().mT, dsums, onto=_product(chunks.phi_k, dafter.mT))
    return dphi_q, dphi_k, dvalues


def _product(x: Tensor, y: Tensor, *, onto: Tensor | None = None) -> Tensor:
    """x y for each chunk; added to `onto`, in place, where that is given."""
    leading = x.shape[:3]
    x, y = x.flatten(0, 2), y.flatten(0, 2)
    if onto is None:
        return torch.bmm(x, y).unflatten(0, leading)
    return onto.flatten(0, 2).baddbmm_(x, y).unflatten(0, leading)


def _chunked(x_BHLR: Tensor) -> Tensor:
    """Cuts positions into chunks, the last one filled up with zeros."""
    missing = -x_BHLR.shape[2] % CHUNK
    padded = F.pad(x_BHLR, (0, 0, 0, missing)) if missing else x_BHLR
    return padded.unflatten(2, (-1, CHUNK))


def _positions(chunks: Tensor, tile: Tile) -> Tensor:
    """Undoes `_chunked`."""
    return chunks.flatten(2, 3)[:, :, : tile.rows.stop - tile.rows.start]
