"""Softmax attention of blocks of queries, each of which sees separate blocks of keys.

Keys and values are gathered for a tile of blocks at a time, and again in the backward pass: for all
blocks at once they would need many times the memory of the values.

A block of keys accumulates gradients from many tiles. On a GPU the order of these sums varies,
unless torch.use_deterministic_algorithms is on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.ops.blocks import softmax_in_blocks
from protlm.attention.ops.numerics import accum_dtype, at_once

# The elements of the keys of a tile: they fit into the caches of a CPU, and occupy a GPU.
_CPU_ELEMENTS, _GPU_ELEMENTS = 1 << 20, 1 << 26


@dataclass(frozen=True)
class SeenKeys:
    """The keys that every block of queries sees: global keys, and the keys of some blocks.

    The place of a key is 1 + its position, or 0 if no query may see it. A query sees the keys with
    places from 1 to the last place of the query, (S, M), or (S, 1) for all queries of a block.
    `numbers` are the distinct blocks of keys for every block of queries, (B, H, S, any); -1 for no
    block.
    """

    numbers: Tensor
    place_BSM: Tensor
    global_place_BP: Tensor
    last_place: Tensor

    def tiles(self, width: int) -> Iterator[slice]:
        """Yields the ranges of blocks whose keys are gathered together."""
        batch, heads, number, selected = self.numbers.shape
        num_keys = self.global_place_BP.shape[1] + selected * self.place_BSM.shape[2]
        step = at_once(
            self.numbers, batch * heads * num_keys * width, cpu=_CPU_ELEMENTS, gpu=_GPU_ELEMENTS
        )
        return (slice(start, start + step) for start in range(0, number, step))

    def take(self, global_BHPK: Tensor, blocks_BHSMK: Tensor, tile: slice) -> Tensor:
        """Gathers the keys of a tile, (B, H, blocks of the tile, keys, K), global keys first."""
        size, width = blocks_BHSMK.shape[3:]
        numbers = self.numbers[:, :, tile].transpose(1, 2)
        flat = blocks_BHSMK.flatten(0, 2).index_select(0, self._rows(tile))
        # Heads come after blocks in memory, so that the fused kernels need no copy.
        selected = flat.view(*numbers.shape[:3], numbers.shape[3] * size, width)
        everywhere = global_BHPK[:, None].expand(-1, selected.shape[1], -1, -1, -1)
        return torch.cat([everywhere, selected], dim=3).transpose(1, 2)

    def add(self, taken: Tensor, onto_global_BHPK: Tensor, onto_BHSMK: Tensor, tile: slice) -> None:
        """Scatters gradients of the keys of a tile, adding in place; inverts `take`."""
        taken, num_global = taken.to(onto_BHSMK.dtype), onto_global_BHPK.shape[2]
        onto_global_BHPK += taken[:, :, :, :num_global].sum(dim=2)
        flat = onto_BHSMK.view(-1, *onto_BHSMK.shape[3:])
        selected = taken.transpose(1, 2)[:, :, :, num_global:].reshape(-1, *flat.shape[1:])
        flat.index_add_(0, self._rows(tile), selected)

    def visible(self, tile: slice) -> Tensor:
        """Returns the mask of visible keys of a tile, (B, H, blocks, 1 or M, keys)."""
        numbers = self.numbers[:, :, tile]
        sample_B111 = torch.arange(len(numbers), device=numbers.device)[:, None, None, None]
        places = self.place_BSM[sample_B111, numbers].where(numbers[..., None] >= 0, 0).flatten(3)
        everywhere = self.global_place_BP[:, None, None].expand(*places.shape[:3], -1)
        places = torch.cat([everywhere, places], dim=-1)[..., None, :]
        return (places > 0) & (places <= self.last_place[tile, :, None])

    def _rows(self, tile: slice) -> Tensor:
        """Returns the rows of the blocks of a tile in all samples and heads, head after block."""
        batch, heads, number, _ = self.numbers.shape
        start = number * torch.arange(batch * heads, device=self.numbers.device)
        # Block 0 replaces missing blocks; its keys are masked there.
        rows = self.numbers[:, :, tile].clamp(min=0) + start.view(batch, heads, 1, 1)
        return rows.transpose(1, 2).flatten()


class SelectedBlocksAttention(torch.autograd.Function):
    """`apply(q, k, v, global_k, global_v, selection)` returns the outputs of all blocks, BHSMC."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHSMK: Tensor,
        k_BHSMK: Tensor,
        v_BHSMC: Tensor,
        global_k_BHPK: Tensor,
        global_v_BHPC: Tensor,
        selection: SeenKeys,
    ) -> Tensor:
        out_BHSMC = torch.empty_like(v_BHSMC)
        ctx.tiles = list(selection.tiles(max(k_BHSMK.shape[-1], v_BHSMC.shape[-1])))
        for tile in ctx.tiles:
            out_BHSMC[:, :, tile] = softmax_in_blocks(
                q_BHSMK[:, :, tile],
                selection.take(global_k_BHPK, k_BHSMK, tile),
                selection.take(global_v_BHPC, v_BHSMC, tile),
                selection.visible(tile),
            )
        device = q_BHSMK.device.type
        ctx.autocast = {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
        }
        ctx.selection = selection
        ctx.save_for_backward(q_BHSMK, k_BHSMK, v_BHSMC, global_k_BHPK, global_v_BHPC)
        return out_BHSMC

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Recomputes every tile with its gradients; those of keys accumulate in float32."""
        (dout_BHSMC,) = grad_outputs
        selection: SeenKeys = ctx.selection
        # Accessed once: activation checkpointing does not allow a second access.
        q_BHSMK, *taken_from = ctx.saved_tensors
        k_BHSMK, v_BHSMC, global_k_BHPK, global_v_BHPC = taken_from
        dq_BHSMK = torch.empty_like(q_BHSMK)
        dk_BHSMK, dv_BHSMC, dglobal_k_BHPK, dglobal_v_BHPC = (
            torch.zeros(x.shape, dtype=accum_dtype(x), device=x.device) for x in taken_from
        )
        for tile in ctx.tiles:
            q = q_BHSMK[:, :, tile].detach().requires_grad_()
            k = selection.take(global_k_BHPK, k_BHSMK, tile).requires_grad_()
            v = selection.take(global_v_BHPC, v_BHSMC, tile).requires_grad_()
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                out = softmax_in_blocks(q, k, v, selection.visible(tile))
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout_BHSMC[:, :, tile])
            dq_BHSMK[:, :, tile] = dq
            selection.add(dk, dglobal_k_BHPK, dk_BHSMK, tile)
            selection.add(dv, dglobal_v_BHPC, dv_BHSMC, tile)
        sums = (dk_BHSMK, dv_BHSMC, dglobal_k_BHPK, dglobal_v_BHPC)
        return dq_BHSMK, *(dx.to(x.dtype) for dx, x in zip(sums, taken_from, strict=True)), None


_LOW_32 = 0xFFFFFFFF


@dataclass(frozen=True)
class FixedBlocks:
    """How many blocks every block sees at both ends of the sequence and next to itself, undrawn."""

    first: int
    last: int
    before: int
    after: int


def hash_keys(seed: int, number: int) -> Tensor:
    """Draws the keys of `number` independent hashes: integers below 2^32, int64."""
    return torch.randint(_LOW_32 + 1, (number,), generator=torch.Generator().manual_seed(seed))


def scramble(x: Tensor) -> Tensor:
    """Applies a fixed permutation of the integers below 2^32 that mixes all bits.

    Two rounds of multiplying and shifting (the constants are `prospector32` of C. Wellons,
    nullprogram.com/blog/2018/07/31); products are below 2^62, so that int64 suffices.
    Bits of `x` above bit 31 are ignored.
    """
    x = x & _LOW_32
    x = (x ^ (x >> 15)) * 0x2C1B3C6D & _LOW_32
    x = (x ^ (x >> 12)) * 0x297A2D39 & _LOW_32
    return x ^ (x >> 15)


def random_subsets(key: Tensor, num_candidates: Tensor, size: int) -> Tensor:
    """Draws `size` numbers below `num_candidates` without replacement, for every hash key.

    Returns (..., size), -1 where no candidate was left. Every subset is equally likely. This is
    Robert Floyd's algorithm (J. Bentley and R. Floyd, CACM 30(9), 1987): a turn with n candidates
    draws one of them, and replaces a repeated one by the last candidate. The cost is size²,
    independent of the number of candidates, which is below 2^31.
    """
    key, num_candidates = torch.broadcast_tensors(key, num_candidates)
    drawn = key.new_empty(*key.shape, size)
    for turn in range(size):
        last = num_candidates - size + turn
        # Uniform from 0 to `last`, up to one part in 2^32 / last.
        chosen = scramble(key + turn) * (last + 1) >> 32
        is_taken = (drawn[..., :turn] == chosen[..., None]).any(dim=-1)
        drawn[..., turn] = torch.where(is_taken, last, chosen).where(last >= 0, -1)
    return drawn


def draw_blocks(key_H: Tensor, num_blocks_BS: Tensor, fixed: FixedBlocks, size: int) -> Tensor:
    """Draws distinct blocks for every block and head among `num_blocks_BS`, but not `fixed` ones.

    Returns (B, H, S, size), -1 where no candidate was left: a pure function of the head's key, the
    block and the number of blocks.
    """
    row_S = torch.arange(num_blocks_BS.shape[1], device=key_H.device)
    # The candidates are the blocks from `first` to the end, except a gap around the block itself.
    end_BS = (num_blocks_BS - fixed.last).clamp(min=fixed.first)
    gap_start_BS = (row_S - fixed.before).clamp(min=fixed.first).minimum(end_BS)
    gap_end_BS = (row_S + fixed.after + 1).clamp(min=fixed.first).minimum(end_BS)
    gap_BS = gap_end_BS - gap_start_BS
    key_BHS = scramble(scramble(key_H[:, None] + num_blocks_BS[:, None]) + row_S)
    drawn = random_subsets(key_BHS, (end_BS - fixed.first - gap_BS)[:, None], size)
    block = fixed.first + drawn
    is_after_gap = block >= gap_start_BS[:, None, :, None]
    return torch.where(drawn < 0, -1, block + is_after_gap * gap_BS[:, None, :, None])
