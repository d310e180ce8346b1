"""Random blocks: distinct, legal, each as likely as any other, and the same on every call."""

import torch
from torch import Tensor

from protlm.attention.ops.block_sparse import FixedBlocks, draw_blocks, hash_keys, random_subsets


def test_subsets_are_distinct_and_complete() -> None:
    num_candidates = torch.arange(-2, 30).expand(50, -1)
    keys = torch.arange(50)[:, None]
    for size in (0, 1, 3, 8):
        drawn = random_subsets(keys, num_candidates, size)
        assert drawn.shape == (50, 32, size)
        for row, candidates in zip(
            drawn.flatten(0, 1).tolist(), num_candidates.flatten().tolist(), strict=True
        ):
            numbers = [number for number in row if number != -1]
            assert len(set(numbers)) == len(numbers) == min(size, max(candidates, 0))
            assert set(numbers) <= set(range(candidates))


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


def test_random_blocks_are_legal() -> None:
    """The released plans draw blocks twice, and from the start of the sequence alone."""
    numbers = [1, 2, 3, 5, 6, 7, 8, 12, 40]
    for fixed in (FixedBlocks(1, 1, 1, 1), FixedBlocks(0, 0, 2, 2), FixedBlocks(2, 0, 3, 0)):
        blocks = drawn_blocks(numbers, fixed, 3)
        for sample, number in enumerate(numbers):
            for row in range(number):
                known = {*range(row - fixed.before, row + fixed.after + 1), *range(fixed.first)}
                legal = set(range(number - fixed.last)) - known
                for chosen in blocks[sample, :, row].tolist():
                    real = [block for block in chosen if block != -1]
                    assert len(set(real)) == len(real) == min(3, len(legal))
                    assert set(real) <= legal


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
