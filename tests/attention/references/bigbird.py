"""BigBird in O(L²): softmax under a dense mask that is built from the sets of arXiv 2007.14062."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# ITC: blocks at both ends are global.
CORE: dict[str, Any] = {"block_size": 8, "random_blocks": 2}
# All at once, a window that reaches two blocks to either side, and residues in the first block, in
# a middle one and beyond many samples.
HARD: dict[str, Any] | None = {
    "block_size": 4,
    "window_blocks": 5,
    "global_blocks": 2,
    "num_global": 13,
    "random_blocks": 5,
    "global_positions": [50, 5, 90],
}
FURTHER: list[dict[str, Any]] = [
    # ETC: the first tokens are global.
    {"block_size": 8, "global_blocks": 0, "num_global": 11, "random_blocks": 0},
    # Residues alone.
    {"block_size": 8, "global_blocks": 0, "global_positions": [33, 12]},
    # Only the block itself and random ones.
    {"block_size": 16, "window_blocks": 1, "global_blocks": 0, "random_blocks": 3},
]


def is_linear_in_values(options: Mapping[str, Any]) -> bool:
    """Always."""
    return True


def rows_sum_to_one(options: Mapping[str, Any]) -> bool:
    """Always."""
    return True


def hash32(x: int) -> int:
    """The 32-bit hash `prospector32`."""
    x = (x ^ (x >> 15)) * 0x2C1B3C6D % 2**32
    x = (x ^ (x >> 12)) * 0x297A2D39 % 2**32
    return x ^ (x >> 15)


def drawn(key: int, candidates: list[int], size: int) -> set[int]:
    """Floyd's sample of some candidates, all of them if they are few."""
    chosen: set[int] = set()
    for last in range(max(0, len(candidates) - size), len(candidates)):
        turn = last - (len(candidates) - size)
        pick = hash32((key + turn) % 2**32) * (last + 1) // 2**32
        chosen.add(last if pick in chosen else pick)
    return {candidates[number] for number in chosen}


def blocks_seen(
    key: int, row: int, num_blocks: int, options: Mapping[str, Any], *, causal: bool
) -> tuple[set[int], set[int]]:
    """Returns the blocks that block `row` of a sequence sees: its window, and random ones."""
    first = last = options["global_blocks"]
    half = options["window_blocks"] // 2
    window = set(range(row - half, row + half + 1))
    if causal:
        window = set(range(row - options["window_blocks"] + 1, row + 1))
        num_blocks, last = row + 1, 0
    first = max(first, options["num_global"] // options["block_size"])
    candidates = [block for block in range(first, num_blocks - last) if block not in window]
    row_key = hash32((hash32((key + num_blocks) % 2**32) + row) % 2**32)
    return window, drawn(row_key, candidates, options["random_blocks"])


def count_blocks(mask_L: Tensor, block_size: int) -> int:
    """The blocks of one sample, up to its last true position."""
    true = mask_L.nonzero().flatten().tolist()
    return true[-1] // block_size + 1 if true else 0


def global_positions(mask_L: Tensor, options: Mapping[str, Any], *, causal: bool) -> set[int]:
    """First tokens and residues of one sample, its first blocks and, unless causal, last ones."""
    true = mask_L.nonzero().flatten().tolist()
    ends, block_size = options["global_blocks"], options["block_size"]
    num_blocks = count_blocks(mask_L, block_size)
    blocks = set(range(ends))
    if not causal:
        blocks |= set(range(num_blocks - ends, num_blocks))
    in_blocks = {position for position in true if position // block_size in blocks}
    residues = {true[n] for n in options["global_positions"] if n < len(true)}
    return in_blocks | set(true[: options["num_global"]]) | residues


def sees(key: int, mask_L: Tensor, options: Mapping[str, Any], *, causal: bool) -> Tensor:
    """Which position sees which in one sample and head, before padding and causality: LL."""
    length, block_size = len(mask_L), options["block_size"]
    num_blocks = count_blocks(mask_L, block_size)
    seen_LL = torch.zeros(length, length, dtype=torch.bool)
    for row in range(num_blocks):
        queries = slice(row * block_size, (row + 1) * block_size)
        for block in set.union(*blocks_seen(key, row, num_blocks, options, causal=causal)):
            if block >= 0:
                seen_LL[queries, block * block_size : (block + 1) * block_size] = True
    everyone = sorted(global_positions(mask_L, options, causal=causal))
    seen_LL[:, everyone] = True
    seen_LL[everyone] = True
    return seen_LL


def output(
    mechanism: nn.Module,
    options: Mapping[str, Any],
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    *,
    hidden_BLD: Tensor,
    visible_B1LL: Tensor,
    causal: bool,
) -> Tensor:
    """Every output as a weighted mean over the keys it sees."""
    keys = dict(mechanism.named_buffers())["hash_key"].tolist()
    # A true position sees itself, and padding before the first true position sees nothing.
    mask_BL = visible_B1LL[:, 0].diagonal(dim1=1, dim2=2)
    both_BLL = mask_BL[:, :, None] & mask_BL[:, None, :]
    causal = not torch.equal(visible_B1LL[:, 0], both_BLL)
    seen_BHLL = torch.stack(
        [
            torch.stack([sees(key, mask_L, options, causal=causal) for key in keys])
            for mask_L in mask_BL
        ]
    )
    exponents_BHLL = torch.einsum("bhik,bhjk->bhij", q_BHLK, k_BHLK) / math.sqrt(q_BHLK.shape[-1])
    exponents_BHLL = exponents_BHLL - exponents_BHLL.detach().amax(-1, keepdim=True)
    weights_BHLL = exponents_BHLL.exp() * (seen_BHLL & visible_B1LL)
    totals_BHL1 = weights_BHLL.sum(-1, keepdim=True)
    # A row that sees nothing is 0 / 1.
    totals_BHL1 = totals_BHL1 + (totals_BHL1 == 0)
    return (weights_BHLL / totals_BHL1) @ v_BHLC
