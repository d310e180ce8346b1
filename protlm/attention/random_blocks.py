"""Random blocks from a hash: the same on every call and device, without a table or a state."""

from dataclasses import dataclass

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF


@dataclass(frozen=True)
class FixedBlocks:
    """The blocks that a block sees anyway, in numbers of blocks.

    Attributes:
        first: at the start of the sequence.
        last: at its end.
        before: right before the own one.
        after: right after the own one.
    """

    first: int
    last: int
    before: int
    after: int


def hash_keys(seed: int, number: int) -> Tensor:
    """Draws the keys of `number` independent hashes: integers below 2^32, int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(_LOW_32 + 1, (number,), generator=generator)


def scramble(x: Tensor) -> Tensor:
    """A fixed permutation of the integers below 2^32, in which every bit depends on all others.

    Two rounds of multiplying and shifting (the constants are `prospector32` of C. Wellons,
    nullprogram.com/blog/2018/07/31); products stay below 2^62, so that int64 is enough for them.
    What is above bit 31 of `x` is left out.
    """
    x = x & _LOW_32
    x = (x ^ (x >> 15)) * 0x2C1B3C6D & _LOW_32
    x = (x ^ (x >> 12)) * 0x297A2D39 & _LOW_32
    return x ^ (x >> 15)


def random_subsets(key: Tensor, num_candidates: Tensor, size: int) -> Tensor:
    """Draws `size` of the numbers below `num_candidates` without replacement, for every key.

    Every subset is as likely as any other. Robert Floyd's algorithm (J. Bentley and R. Floyd,
    CACM 30(9), 1987): the turn with n candidates draws one of them, and takes the last one in the
    place of one that it has already. It costs size², whatever the number of candidates.

    Args:
        key: what decides, int64.
        num_candidates: how many there are to draw from, below 2^31; broadcasts with `key`.
        size: how many to draw. Where there are not as many, all of them are drawn.

    Returns:
        (..., size), -1 where nothing was left to draw.
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
    """Draws blocks for every block and head, distinct ones that are not among the fixed ones.

    What is drawn is a pure function of the head's key, the block and the number of blocks.

    Args:
        key_H: from `hash_keys`.
        num_blocks_BS: the number of blocks to choose from, the fixed ones included.
        fixed: what is no candidate.
        size: blocks to draw. Where there are not as many candidates, all of them are drawn.

    Returns:
        Numbers of blocks, (B, H, S, size), -1 where nothing was left to draw.
    """
    row_S = torch.arange(num_blocks_BS.shape[1], device=key_H.device)
    # The candidates are those from `first` to before the end, but for a gap around the own block.
    end_BS = (num_blocks_BS - fixed.last).clamp(min=fixed.first)
    gap_start_BS = (row_S - fixed.before).clamp(min=fixed.first).minimum(end_BS)
    gap_end_BS = (row_S + fixed.after + 1).clamp(min=fixed.first).minimum(end_BS)
    gap_BS = gap_end_BS - gap_start_BS
    key_BHS = scramble(scramble(key_H[:, None] + num_blocks_BS[:, None]) + row_S)
    drawn = random_subsets(key_BHS, (end_BS - fixed.first - gap_BS)[:, None], size)
    block = fixed.first + drawn
    is_behind = block >= gap_start_BS[:, None, :, None]
    return torch.where(drawn < 0, -1, block + is_behind * gap_BS[:, None, :, None])
