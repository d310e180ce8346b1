"""Random blocks by hashing: reproducible on every device, without tables or state."""

from dataclasses import dataclass

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF


@dataclass(frozen=True)
class FixedBlocks:
    """The blocks that every block sees, which are not drawn; counts of blocks.

    Attributes:
        first: at the start of the sequence.
        last: at its end.
        before: immediately before the block itself.
        after: immediately after it.
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
    """Draws `size` numbers below `num_candidates` without replacement, for every key.

    Every subset is equally likely. This is Robert Floyd's algorithm (J. Bentley and R. Floyd, CACM
    30(9), 1987): a turn with n candidates draws one of them, and replaces a repeated one by the
    last candidate. The cost is size², independent of the number of candidates.

    Args:
        key: the hash key, int64.
        num_candidates: the number of candidates, below 2^31; broadcasts with `key`.
        size: the number of draws. If there are fewer candidates, all of them are drawn.

    Returns:
        (..., size), -1 where no candidate was left.
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
    """Draws distinct blocks for every block and head, excluding the fixed ones.

    The result is a pure function of the head's key, the block and the number of blocks.

    Args:
        key_H: from `hash_keys`.
        num_blocks_BS: the number of blocks to choose from, the fixed ones included.
        fixed: the blocks that are not candidates.
        size: the number of draws. If there are fewer candidates, all of them are drawn.

    Returns:
        Numbers of blocks, (B, H, S, size), -1 where no candidate was left.
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
