"""Random blocks: distinct, legal, each as likely as any other, and the same on every call."""

import torch
from torch import Tensor

from protlm.attention.ops.block_sparse import FixedBlocks, draw_blocks, hash_keys, random_subsets


def chi_square(counts: Tensor) -> float:
    """The deviation of counts from their mean, in standard deviations of what chance does."""
    expected = counts.double().mean()
    square = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.numel() - 1
    return float((square - freedom) / (2 * freedom) ** 0.5)


def test_every_subset_is_as_likely_as_any_other() -> None:
    """Of 7 candidates 3 are drawn: 35 subsets; consecutive keys are the worst ones."""
    drawn = random_subsets(torch.arange(70_000), torch.tensor(7), 3)
    subsets, counts = drawn.sort(dim=-1).values.unique(dim=0, return_counts=True)
    assert len(subsets) == 35
    assert abs(chi_square(counts)) < 4


def drawn_blocks(num_blocks: list[int], fixed: FixedBlocks, size: int, *, seed: int = 0) -> Tensor:
    """Draws blocks for three heads, in sequences of the given numbers of blocks."""
    num_blocks_BS = torch.tensor(num_blocks)[:, None].expand(-1, max(num_blocks))
    return draw_blocks(hash_keys(seed, 3), num_blocks_BS, fixed, size)


def test_random_blocks_come_from_everywhere_alike() -> None:
    """Of 40 blocks, a row in the middle draws each legal one as often as any other."""
    fixed, num_blocks_BS = FixedBlocks(1, 1, 1, 1), torch.full((1, 40), 40)
    drawn = draw_blocks(hash_keys(0, 4000), num_blocks_BS, fixed, 3)[0, :, 17]
    counts = drawn.flatten().bincount(minlength=40)
    legal = [block for block in range(1, 39) if abs(block - 17) > 1]
    assert counts.sum() == counts[legal].sum() == 12_000
    assert abs(chi_square(counts[legal])) < 4


def test_heads_seeds_rows_and_lengths_draw_differently() -> None:
    fixed = FixedBlocks(0, 0, 0, 0)
    one, other = (drawn_blocks([400, 399], fixed, 2, seed=seed) for seed in (0, 1))
    assert torch.equal(one, drawn_blocks([400, 399], fixed, 2))
    pairs = [
        (one, other),
        (one[:, 0], one[:, 1]),
        (one[0], one[1]),
        (one[:, :, 1:], one[:, :, :-1]),
    ]
    for first, second in pairs:
        assert (first == second).double().mean() < 0.02
