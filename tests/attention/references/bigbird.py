"""BigBird: softmax under a mask that is built from the sets of arXiv 2007.14062."""

import torch
from torch import Tensor

from tests.attention.truth import NEVER, Given, Options, logits


@logits(
    # ITC: blocks at both ends are global.
    {"block_size": 8, "random_blocks": 2},
    # All at once, a window that reaches two blocks to either side, and residues in the first block,
    # in a middle one and beyond many samples.
    {
        "block_size": 4,
        "window_blocks": 5,
        "global_blocks": 2,
        "num_global": 13,
        "random_blocks": 5,
        "global_positions": [50, 5, 90],
    },
    further=[
        # ETC: the first tokens are global.
        {"block_size": 8, "global_blocks": 0, "num_global": 11, "random_blocks": 0},
        # Residues alone.
        {"block_size": 8, "global_blocks": 0, "global_positions": [33, 12]},
        # Only the block itself and random ones.
        {"block_size": 16, "window_blocks": 1, "global_blocks": 0, "random_blocks": 3},
    ],
)
def bigbird(given: Given) -> Tensor:
    keys = given.tensors["hash_key"].tolist()
    samples = [
        torch.stack([sees(key, mask_L, given.options, causal=given.causal) for key in keys])
        for mask_L in given.mask_BL
    ]
    return given.logits().masked_fill(~torch.stack(samples), NEVER)


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


def blocks_seen(key: int, row: int, number: int, options: Options, *, causal: bool) -> set[int]:
    """The blocks that block `row` of a sequence sees: its window, and random ones."""
    first, last = max(options["global_blocks"], options["num_global"] // options["block_size"]), 0
    window = set(range(row - options["window_blocks"] + 1, row + 1))
    if causal:
        number = row + 1
    else:
        last, half = options["global_blocks"], options["window_blocks"] // 2
        window = set(range(row - half, row + half + 1))
    candidates = [block for block in range(first, number - last) if block not in window]
    row_key = hash32((hash32((key + number) % 2**32) + row) % 2**32)
    seen = window | drawn(row_key, candidates, options["random_blocks"])
    return {block for block in seen if block >= 0}


def sees(key: int, mask_L: Tensor, options: Options, *, causal: bool) -> Tensor:
    """Which position sees which in one sample and head, before padding and causality: LL."""
    size, true = options["block_size"], mask_L.nonzero().flatten().tolist()
    number = true[-1] // size + 1 if true else 0
    seen_LL = torch.zeros(len(mask_L), len(mask_L), dtype=torch.bool)
    for row in range(number):
        for block in blocks_seen(key, row, number, options, causal=causal):
            of_keys = slice(block * size, (block + 1) * size)
            seen_LL[row * size : (row + 1) * size, of_keys] = True
    # First tokens and residues, first blocks and, unless causal, last ones.
    ends = options["global_blocks"]
    blocks = {*range(ends), *(range(0) if causal else range(number - ends, number))}
    everyone = {position for position in true if position // size in blocks}
    everyone |= {true[n] for n in options["global_positions"] if n < len(true)}
    everyone |= set(true[: options["num_global"]])
    seen_LL[:, sorted(everyone)] = seen_LL[sorted(everyone)] = True
    return seen_LL
