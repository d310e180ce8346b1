"""Random projections: the distribution of their rows, over 20,000 blocks of 8 rows each."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention.ops.projection import Projection, RowNorms, RowSampling
from protlm.system.errors import UserError

BLOCKS, DIM = 20_000, 8
# Passed by chance once in 300 runs by any of 5,000 statistics.
Z = 5.0


@cache
def blocks(sampling: RowSampling, row_norms: RowNorms = RowNorms.chi) -> Tensor:
    """Independent blocks of rows, (20,000, 8, 8)."""
    projection = Projection(BLOCKS * DIM, DIM, sampling=sampling, row_norms=row_norms)
    return projection.draw(seed=0, index=0).unflatten(0, (BLOCKS, DIM))


def directions(sampling: RowSampling) -> Tensor:
    return torch.nn.functional.normalize(blocks(sampling), dim=-1)


def largest_z(samples: Tensor, expected: Tensor | float) -> float:
    """The largest distance of a mean over the first axis from what it should be, in errors."""
    standard_error = samples.std(dim=0) / math.sqrt(len(samples))
    return ((samples.mean(dim=0) - expected).abs() / standard_error).max().item()


def kolmogorov_smirnov(samples: Tensor, cumulative: Tensor) -> float:
    """√n times the largest distance of the distribution from `cumulative`, its own at a sample."""
    order = samples.argsort()
    steps = torch.arange(1, len(samples) + 1) / len(samples)
    return (cumulative[order] - steps).abs().max().item() * math.sqrt(len(samples))


def correlations(samples: Tensor) -> Tensor:
    """The correlations of all columns, in standard errors; 0 on the diagonal."""
    return torch.corrcoef(samples.mT).fill_diagonal_(0).abs() * math.sqrt(len(samples))


@pytest.mark.parametrize(
    "sampling", [RowSampling.orthogonal, RowSampling.hadamard, RowSampling.givens]
)
def test_rows_are_orthogonal_within_a_block(sampling):
    rows = directions(sampling)
    assert (rows @ rows.mT - torch.eye(DIM)).abs().max() < 1e-5
    ragged = Projection(3 * DIM + 5, DIM, sampling=sampling, row_norms=RowNorms.sqrt_dim).draw(0, 0)
    for block in ragged.split(DIM):
        assert (block @ block.mT / DIM - torch.eye(len(block))).abs().max() < 1e-5


# With u = (HD₁)H and independent signs d, an entry Σ_l u_il d_l H_lj has the fourth moment
# (3 - 2 Σ_l E u_il⁴) / K², and E u_il⁴ = (3 - 2/K) / K². One or two factors, or a uniform
# orthogonal matrix, have others: 1, 3 - 2/K and 3K / (K + 2).
FOURTH = 3 - 6 / DIM + 4 / DIM**2
# A rotation by a random angle in a random plane brings the expected square of an entry closer to
# its mean 1/K, by the factor 1 - 1 / (K - 1).
REMAINING = (1 - 1 / (DIM - 1)) ** (DIM * math.ceil(math.log(DIM)))
ROTATED = 1 / DIM + REMAINING * (torch.eye(DIM) - 1 / DIM)
EVERY, THREE = list(RowSampling), [RowSampling.orthogonal, RowSampling.iid, RowSampling.hadamard]
# A statistic of rows or of their directions, its mean, and the laws that have it.
MOMENTS: list[tuple[Any, Callable[..., Tensor], Tensor | float, list[RowSampling]]] = [
    # A QR without its sign correction fails here by a hundred standard errors.
    (blocks, lambda rows: rows, 0, EVERY),
    (directions, lambda rows: rows, 0, EVERY),
    (blocks, lambda rows: rows[..., :, None] * rows[..., None, :], torch.eye(DIM), THREE),
    (directions, lambda rows: rows.pow(4) * DIM**2, FOURTH, [RowSampling.hadamard]),
    (directions, lambda rows: rows.square(), ROTATED, [RowSampling.givens]),
]


@pytest.mark.parametrize(("rows_of", "statistic", "expected", "laws"), MOMENTS)
def test_rows_have_the_moments_of_their_law(rows_of, statistic, expected, laws):
    for sampling in laws:
        assert largest_z(statistic(rows_of(sampling)), expected) < Z, sampling


def test_products_of_rotations_are_rotations():
    determinants = torch.linalg.det(directions(RowSampling.givens))
    torch.testing.assert_close(determinants.mean().item(), 1.0)


@pytest.mark.parametrize("sampling", [RowSampling.orthogonal, RowSampling.iid])
def test_rows_are_standard_normal(sampling):
    for row in blocks(sampling).unbind(1):
        entries = row.flatten()
        # Passed by chance once in 25,000 times.
        assert kolmogorov_smirnov(entries, torch.special.ndtr(entries)) < 2.25


def test_iid_rows_are_independent():
    rows = blocks(RowSampling.iid).flatten(1)
    assert correlations(rows).max() < Z
    assert correlations(rows.square()).max() < Z


@pytest.mark.parametrize("sampling", RowSampling)
def test_blocks_are_independent(sampling):
    pairs = blocks(sampling).unflatten(0, (-1, 2)).flatten(1)
    half = DIM * DIM
    # Entries of one block depend on each other in some laws, so only the corner is tested.
    assert correlations(pairs)[:half, half:].max() < Z
    assert correlations(pairs.square())[:half, half:].max() < Z


@pytest.mark.parametrize("sampling", RowSampling)
def test_norms_are_chi_distributed_or_one_number(sampling):
    half_squares = blocks(sampling).square().sum(dim=-1).flatten() / 2
    shape = torch.tensor(DIM / 2, dtype=torch.float64)
    assert kolmogorov_smirnov(half_squares, torch.special.gammainc(shape, half_squares)) < 2.25
    norms = blocks(sampling, RowNorms.sqrt_dim).norm(dim=-1)
    torch.testing.assert_close(norms, torch.full_like(norms, math.sqrt(DIM)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("sampling", RowSampling)
def test_norms_are_independent_of_each_other_and_of_the_directions(sampling):
    norms = blocks(sampling).norm(dim=-1)
    for magnitudes in directions(sampling).abs().unbind(1):
        columns = torch.cat([norms, magnitudes[:, 1:]], dim=1)
        assert correlations(columns)[:DIM].max() < Z


@pytest.mark.parametrize("sampling", RowSampling)
def test_antithetic_rows_mirror_the_others(sampling):
    rows = Projection(30, DIM, sampling=sampling, antithetic=True).draw(3, 7)
    half = Projection(15, DIM, sampling=sampling).draw(3, 7)
    assert torch.equal(rows, torch.cat([half, -half]))


@pytest.mark.parametrize("sampling", RowSampling)
def test_a_draw_is_a_pure_function_of_seed_and_index(sampling):
    projection = Projection(20, DIM, sampling=sampling)
    rows = projection.draw(3, 7)
    assert rows.shape == (20, DIM) and rows.dtype == torch.float64
    assert torch.equal(rows, projection.draw(3, 7))
    for seed, index in [(3, 8), (4, 7), (7, 3), (4, 6)]:
        others = projection.draw(seed, index)
        assert not torch.isin(rows.norm(dim=1), others.norm(dim=1)).any()


def test_draws_are_those_of_earlier_versions():
    expected = [
        [0.839103246279, 0.820187479817],
        [-1.437094886790, 1.470238225272],
        [-1.108686464577, 0.556354247519],
    ]
    rows = Projection(3, 2).draw(3, 7)
    torch.testing.assert_close(rows, torch.tensor(expected).to(rows), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "sampling", [RowSampling.orthogonal, RowSampling.iid, RowSampling.hadamard]
)
def test_heads_of_width_one_have_rows_of_either_sign(sampling):
    rows = Projection(100, 1, sampling=sampling, row_norms=RowNorms.sqrt_dim).draw(0, 0)
    assert rows.unique().tolist() == [-1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": "hadamard", "head_dim": 24}, "hadamard .* that is a power of two, not 24"),
        ({"sampling": "givens", "head_dim": 1}, "givens .* of 2 or more, not 1"),
    ],
)
def test_impossible_settings_are_explained(settings, message):
    with pytest.raises(UserError, match=f"projection={message}; type attention.projection=orthog"):
        Projection(num_features=16, **settings)
