"""Orthogonal projections: their law, and what a wrong one would do to the estimate."""

import math

import torch
from torch import Tensor

from protlm.attention.performer.projection import orthogonal_projection, projection_generator

DRAWS = 20_000


def draws(num_features: int, head_dim: int, count: int) -> Tensor:
    """Many projections, stacked."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack(
        [orthogonal_projection(num_features, head_dim, generator) for _ in range(count)]
    )


def positive_estimates(rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The SM+ estimate of exp(x·y) by each draw (arXiv 2009.14794, Lemma 1)."""
    return (rows @ (x + y) - (x.square().sum() + y.square().sum()) / 2).exp().mean(dim=-1)


def test_the_estimate_of_the_kernel_is_unbiased() -> None:
    dim = 16
    rows = draws(dim, dim, DRAWS)
    generator = torch.Generator().manual_seed(1)
    # Between vectors of one sign a QR without its sign correction is biased by 20 %.
    positive = torch.rand(2, dim, generator=generator, dtype=torch.float64)
    mixed = torch.randn(2, dim, generator=generator, dtype=torch.float64)
    for pair in (positive, -positive, mixed):
        x, y = pair / pair.norm(dim=1, keepdim=True)
        estimates = positive_estimates(rows, x, y)
        error = estimates.mean() - torch.exp(x @ y)
        assert abs(error) < 4 * estimates.std() / math.sqrt(DRAWS)


def test_rows_have_mean_zero_and_unit_covariance() -> None:
    dim, count = 8, 4000
    rows = draws(dim, dim, count)
    # Each of the 64 entries is N(0, 1): five standard errors are passed once in 30,000 runs.
    assert rows.mean(dim=0).abs().max() < 5 / math.sqrt(count)
    flat = rows.flatten(0, 1)
    covariance = flat.mT @ flat / len(flat)
    assert (covariance - torch.eye(dim)).abs().max() < 5 * math.sqrt(2 / count)


def test_rows_are_orthogonal_within_a_block() -> None:
    dim = 16
    projection = orthogonal_projection(3 * dim + 5, dim, torch.Generator().manual_seed(0))
    assert projection.shape == (3 * dim + 5, dim)
    directions = projection / projection.norm(dim=1, keepdim=True)
    for block in directions.split(dim):
        assert (block @ block.mT - torch.eye(len(block))).abs().max() < 1e-5


def test_norms_are_chi_distributed() -> None:
    dim = 8
    squares = draws(2 * dim, dim, 500).square().sum(-1).flatten().sort().values
    # Kolmogorov-Smirnov against chi-square with `dim` degrees of freedom, at the 0.1 % level.
    expected = torch.special.gammainc(torch.tensor(dim / 2, dtype=torch.float64), squares / 2)
    steps = torch.arange(1, len(squares) + 1) / len(squares)
    assert (expected - steps).abs().max() < 1.95 / math.sqrt(len(squares))


def test_norms_are_independent_of_each_other_and_of_the_directions() -> None:
    count = 4000
    rows = draws(4, 4, count)
    norms = rows.norm(dim=-1)
    directions = rows[:, 0] / norms[:, :1]
    correlation = torch.corrcoef(torch.cat([norms.mT, directions.abs().mT]))[:4]
    # The magnitudes of one direction's coordinates do depend on each other; those rows are cut.
    assert (correlation - torch.eye(4, 8)).abs().max() < 5 / math.sqrt(count)


def test_a_draw_is_a_pure_function_of_seed_and_index() -> None:
    def draw(seed: int, index: int) -> Tensor:
        return orthogonal_projection(20, 8, projection_generator(seed, index))

    assert torch.equal(draw(3, 7), draw(3, 7))
    others = [draw(3, 8), draw(4, 7), draw(7, 3), draw(4, 6)]
    assert not any(torch.equal(draw(3, 7), other) for other in others)
