"""Gated causal linear attention in chunks: S_t = g_t S_{t-1} + (1 - g_t) [v_t | 1]ᵀφ(k_t).

Peng et al., arXiv 2103.02143, section 3.2, in the layout of `protlm.attention.performer.causal`:
products of 64×64 within a chunk, states between chunks, a tile of chunks at a time, features and
states within a tile computed again in the backward pass.

Let c_t be the sum of log g from the chunk's first position to t, t included. In the chunk
φ(q_i)·φ(k_j) has the factor (1 - g_j) exp(c_i - c_j), and what the chunk was given the factor
exp(c_i). No exponent is above 0. A padded position has log g = 0 and writes nothing.

Tensors without a suffix are (B, H, chunks, 64, width), states (B, H, chunks, C + 1, R).
"""

from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from protlm.attention.performer.features import Pullback
from protlm.attention.performer.normalization import inverse_of_weight
from protlm.attention.performer.operands import Kernel, Operands
from protlm.attention.performer.tiles import CHUNK, Tile, tiles
from protlm.attention.precision import full_precision, wide

# A gate nearer to 0 or 1 than 3e-7 is no different in float32, and its logarithms need not be.
_LARGEST_LOGIT = 15.0
# A chunk's state, its gradient and their increments are as large as the features of the chunk.
_SHARE = 2


@final
class Gate(nn.Module):
    """The logits w·h + b of one gate for each head, within ±15.

    w starts from N(0, 0.02²), b so that 1 / (1 - g) is 8 positions in the first head and 512 in the
    last, in equal ratios: from a helix to a protein.

    Args:
        num_heads: heads H.
        model_dim: width D of h.
    """

    def __init__(self, *, num_heads: int, model_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(num_heads, model_dim))
        memory_H = torch.logspace(3, 9, num_heads, base=2.0)
        self.bias = nn.Parameter((memory_H - 1).log())

    def forward(self, hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Returns the logits, BHL1, in float32 (float64 for float64); b at padding."""
        hidden_BLD = wide(hidden_BLD.masked_fill(~mask_BL[..., None], 0))
        with full_precision(hidden_BLD):
            weight, bias = self.weight.to(hidden_BLD.dtype), self.bias.to(hidden_BLD.dtype)
            logits_BLH = F.linear(hidden_BLD, weight, bias)
        return logits_BLH.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT).mT[..., None]


def gated_means(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    gate_BHL1: Tensor,
    mask_BL: Tensor,
    kernel: Kernel,
) -> Tensor:
    """The means of φ(q_i)·φ(k_j) [v_j | 1] over j ≤ i, weighted by the gates: (B, H, L, C + 1).

    The weights (1 - g_j) g_{j+1} … g_i add up to 1 - g_1 … g_i, by which the sums are divided: it
    would cancel in the output, but not in the floor of a denominator. In float32 (float64 for
    float64 queries). Clearing the padding and normalising are left to the caller.

    Args:
        q_BHLK: queries, finite at padding.
        k_BHLK: keys, likewise.
        v_BHLC: values.
        gate_BHL1: logits of the gates g, finite.
        mask_BL: true where there is a residue or special token.
        kernel: the feature map.
    """
    sums = GatedSums.apply(q_BHLK, k_BHLK, v_BHLC, gate_BHL1, mask_BL, kernel)
    assert isinstance(sums, Tensor)
    log_gate_BHL1 = F.logsigmoid(gate_BHL1).masked_fill(~mask_BL[:, None, :, None], 0)
    return sums * inverse_of_weight(-torch.expm1(log_gate_BHL1.cumsum(dim=2)))


class GatedSums(torch.autograd.Function):
    """`apply(q, k, v, gate, mask, kernel)` returns the sums of [v | 1] with all weights.

    Sums at padding mean nothing; their gradients have to be 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        gate_BHL1: Tensor,
        mask_BL: Tensor,
        kernel: Kernel,
    ) -> Tensor:
        """Walks the tiles from left to right, carrying the state."""
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL)
        shape = (*v_BHLC.shape[:-1], v_BHLC.shape[-1] + 1)
        out = v_BHLC.new_empty(shape, dtype=operands.dtype)
        states = []
        groups = list(tiles(q_BHLK, num_features=kernel.num_features, share=_SHARE))
        with full_precision(v_BHLC):
            for group in groups:
                state = _no_state(out, group[0], kernel)
                for tile in group:
                    states.append(state)
                    chunks = _Chunks.of(operands, gate_BHL1, kernel, tile)
                    boundaries = chunks.states(state)
                    sums = chunks.left * (chunks.phi_q @ boundaries[:, :, :-1].mT)
                    sums += chunks.weights() @ chunks.written
                    tile.of(out)[:] = _positions(sums, tile)
                    # A copy, because a view would keep the states of all chunks.
                    state = boundaries[:, :, -1].clone()
        ctx.kernel, ctx.groups = kernel, groups
        ctx.save_for_backward(
            q_BHLK, k_BHLK, v_BHLC, gate_BHL1, mask_BL, kernel.projection_RK, *states
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Walks the tiles from right to left, carrying the gradient of the state."""
        (dsums,) = grad_outputs
        # Once only: activation checkpointing refuses a second look.
        q_BHLK, k_BHLK, v_BHLC, gate_BHL1, mask_BL, _, *states = ctx.saved_tensors
        kernel, operands = ctx.kernel, Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL)
        gradients = [torch.empty_like(x) for x in (q_BHLK, k_BHLK, v_BHLC, gate_BHL1)]
        with full_precision(dsums):
            for group in reversed(ctx.groups):
                dstate = _no_state(dsums, group[0], kernel)
                for tile in reversed(group):
                    chunks = _Chunks.of(operands, gate_BHL1, kernel, tile)
                    dtile = _chunked(tile.of(dsums))
                    found, dstate = _chunk_gradients(chunks, dtile, states.pop(), dstate)
                    dphi_q, dphi_k, dvalues, dgate = (_positions(g, tile) for g in found)
                    parts = (
                        chunks.query_pullback(dphi_q),
                        chunks.key_pullback(dphi_k),
                        dvalues,
                        dgate,
                    )
                    for whole, part in zip(gradients, parts, strict=True):
                        tile.of(whole)[:] = part
        return *gradients, None, None


class _Chunks(NamedTuple):
    """Features, [v | 1] and gates of the chunks of a tile."""

    phi_q: Tensor
    phi_k: Tensor
    values: Tensor
    log_gate: Tensor
    # 1 - g, and 0 where there is nothing to write.
    write: Tensor
    # (1 - g) [v | 1].
    written: Tensor
    # exp(c): what is left at each position of what the chunk was given.
    left: Tensor
    # What is left at the end of the chunk of what each position wrote.
    kept: Tensor
    # What is left at position i of what position j wrote: (B, H, chunks, 64, 64).
    decays: Tensor
    query_pullback: Pullback
    key_pullback: Pullback

    @classmethod
    def of(cls, operands: Operands, gate_BHL1: Tensor, kernel: Kernel, tile: Tile) -> "_Chunks":
        phi_q, query_pullback = kernel.feature_map.queries(operands.queries(tile))
        phi_k, key_pullback = kernel.feature_map.keys(operands.keys(tile))
        log_gate = F.logsigmoid(operands.take(gate_BHL1, tile))
        log_gate = _chunked(operands.clear_padding(log_gate, tile))
        write = -torch.expm1(log_gate)
        log_decay = log_gate.cumsum(dim=3)
        values = _chunked(operands.values_and_ones(tile))
        return cls(
            phi_q=_chunked(phi_q),
            phi_k=_chunked(phi_k),
            values=values,
            log_gate=log_gate,
            write=write,
            written=values * write,
            left=log_decay.exp(),
            kept=(log_decay[..., -1:, :] - log_decay).exp_(),
            decays=_decays(log_decay),
            query_pullback=query_pullback,
            key_pullback=key_pullback,
        )

    def weights(self) -> Tensor:
        """The weights within each chunk, but for the factor 1 - g of the key."""
        return (self.phi_q @ self.phi_k.mT).mul_(self.decays)

    def states(self, first: Tensor) -> Tensor:
        """The states between chunks, from the state before the first to that after the last."""
        increments = (self.written * self.kept).mT @ self.phi_k
        return torch.stack(_scan(increments, self.left[..., -1:, :], first), dim=2)


def _decays(log_decay: Tensor) -> Tensor:
    """exp(c_i - c_j), and 0 for the future of i."""
    # Masked before the exponential, which would be infinite for the future.
    is_future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=log_decay.device).triu(1)
    return (log_decay - log_decay.mT).masked_fill_(is_future, -torch.inf).exp_()


def _chunk_gradients(
    chunks: _Chunks, dsums: Tensor, state: Tensor, dstate: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The gradients of φ(q), φ(k), v and the gate's logits, and of the state before the tile."""
    states = chunks.states(state)
    before, after = states[:, :, :-1], states[:, :, 1:]
    increments = (dsums * chunks.left).mT @ chunks.phi_q
    dstates = _scan(increments.flip(2), chunks.left[..., -1:, :].flip(2), dstate)
    dafter = torch.stack(dstates[-2::-1], dim=2)
    dscores = (dsums @ chunks.written.mT).mul_(chunks.decays)
    dphi_q = chunks.left * (dsums @ before)
    dphi_q += dscores @ chunks.phi_k
    dphi_k = chunks.kept * (chunks.written @ dafter)
    dphi_k += dscores.mT @ chunks.phi_q
    dwritten = chunks.kept * (chunks.phi_k @ dafter.mT)
    dwritten += chunks.weights().mT @ dsums
    dwrite = (dwritten * chunks.values).sum(dim=-1, keepdim=True)
    # c_i comes with φ(q_i), -c_j with φ(k_j) and so with what j wrote, the last c with the state.
    dlog_decay = (chunks.phi_q * dphi_q).sum(dim=-1, keepdim=True) - chunks.write * dwrite
    dlog_decay[..., -1:, :] += (dafter * after).sum(dim=(-1, -2))[..., None, None]
    dlog_gate = dlog_decay.flip(3).cumsum(dim=3).flip(3)
    dgate = chunks.write * (dlog_gate - chunks.log_gate.exp() * dwrite)
    dvalues = (dwritten * chunks.write)[..., :-1]
    return (dphi_q, dphi_k, dvalues, dgate), dstates[-1]


def _scan(increments: Tensor, factors: Tensor, first: Tensor) -> list[Tensor]:
    """x_0 = first, x_{n+1} = factor_n x_n + increment_n: one more than there are chunks."""
    states = [first]
    for increment, factor in zip(increments.unbind(2), factors.unbind(2), strict=True):
        states.append(torch.addcmul(increment, states[-1], factor))
    return states


def _no_state(x: Tensor, tile: Tile, kernel: Kernel) -> Tensor:
    """The state before the first position: of the width of x's last axis, C + 1."""
    batch, heads, _, width = tile.of(x).shape
    return x.new_zeros(batch, heads, width, kernel.num_features)


def _chunked(x_BHLR: Tensor) -> Tensor:
    """Cuts positions into chunks, the last one filled up with zeros."""
    missing = -x_BHLR.shape[2] % CHUNK
    padded = F.pad(x_BHLR, (0, 0, 0, missing)) if missing else x_BHLR
    return padded.unflatten(2, (-1, CHUNK))


def _positions(chunks: Tensor, tile: Tile) -> Tensor:
    """Undoes `_chunked`."""
    return chunks.flatten(2, 3)[:, :, : tile.rows.stop - tile.rows.start]
