"""Random projections and what features of them estimate: distributions over many draws.

A draw is a block of 8 rows, or one row where rows are independent. Estimates are by rows of one
mechanism, so that its own features are what is tested: their formulas are those of the contract.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.linearized.positive import PositiveFeatures, optimal_stretch
from protlm.attention.linearized.variance import (
    LARGEST_ERROR,
    SquareNorms,
    pair_sums,
    relative_error,
)
from protlm.attention.ops.projection import Projection, RowNorms, RowSampling
from protlm.attention.performer_softmax import PerformerSoftmax
from tests.attention.cases import LargestTensor
from tests.marks import slow_but

DIM = 8
BLOCKS = 20_000


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def products(mechanism: PerformerSoftmax, q_B11K: Tensor, k_B11K: Tensor) -> Tensor:
    """The products of features whose sum estimates the kernel, B11R.

    The features of a query lack a factor, which cancels in outputs: see `PositiveFeatures`.
    """
    feature_map = mechanism.feature_map(q_B11K.dtype)
    features = feature_map.queries(q_B11K).phi_BHLR * feature_map.keys(k_B11K).phi_BHLR
    rows_RK = mechanism.projection.to(q_B11K.dtype)
    x_B11K = q_B11K * q_B11K.shape[-1] ** -0.25
    log_factor = square(x_B11K) / 2
    if not mechanism.is_trigonometric:
        lambda_, dim = mechanism.optimal_for, rows_RK.shape[1]
        stretch = 1.0 if lambda_ is None else optimal_stretch(dim, lambda_)
        largest = (stretch * x_B11K @ rows_RK.mT + square(rows_RK) / 2).amax(dim=-1)
        constant = dim * math.log(stretch) - math.log(len(rows_RK)) - stretch**2 * dim / 2
        log_factor = largest - log_factor + constant
    return features * log_factor.exp()[..., None]


def largest_z(draws: Tensor, expected: Tensor | float) -> float:
    """How many standard errors the mean over the first axis is from what is expected, at most."""
    standard_error = draws.std(dim=0) / math.sqrt(len(draws))
    return ((draws.mean(dim=0) - expected).abs() / standard_error).max().item()


def square(x: Tensor) -> Tensor:
    return x.square().sum(dim=-1)


@pytest.mark.parametrize("dim", [64, 512])
def test_key_features_without_a_reference_are_bounded(dim):
    feature_map = PositiveFeatures(Projection(256, dim).draw(seed=5, index=0).float())
    x = 2.5 * normal(1, 1, 512, dim).float()
    assert feature_map.keys(x).phi_BHLR.max() <= math.exp(min(dim / 2, 60))
    assert feature_map.queries(x).phi_BHLR.amax(dim=-1).eq(1).all()


DRAWS = 400_000

SETTINGS: list[dict[str, Any]] = [
    {"estimator": "positive"},
    {"estimator": "positive", "antithetic": True},
    {"estimator": "hyperbolic"},
    {"estimator": "trigonometric", "denominator_floor": 1e-6},
    {"estimator": "positive", "optimal_for": 1.2},
    {"estimator": "positive", "optimal_for": 6.0},
    {"estimator": "positive", "optimal_for": 1.2, "antithetic": True},
]


def predicted(settings: dict[str, Any], norms: SquareNorms, num_features: int = 256) -> Tensor:
    mechanism = PerformerSoftmax(head_dim=64, num_features=num_features, **settings)
    return relative_error(mechanism, norms)


def simulated_and_predicted(settings: dict[str, Any], size: float) -> tuple[float, float]:
    """The relative error of one draw, for one query and one key: measured, and as predicted."""
    mechanism = PerformerSoftmax(
        head_dim=DIM, num_features=2 * DRAWS, projection="iid", redraw_every=None, **settings
    )
    q, k = size * DIM**0.25 * normal(2, 1, 1, 1, DIM, seed=1)
    norms = SquareNorms.of(pair_sums(q, k, torch.ones(1, 1, dtype=torch.bool), causal=False))
    draws = products(mechanism, q, k).flatten()
    if mechanism.estimator != "regularized":
        weight = math.exp(q.flatten() @ k.flatten() / DIM**0.5)
        assert draws.sum().item() == pytest.approx(weight, rel=0.02)
    predicted = relative_error(mechanism, norms).item() * math.sqrt(2 * DRAWS)
    if mechanism.antithetic or mechanism.estimator == "trigonometric":
        draws, predicted = draws.unflatten(0, (2, -1)).mean(0), predicted / math.sqrt(2)
    return float(draws.std() / draws.mean()), predicted


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_prediction_is_the_variance_of_estimates(settings):
    simulated, predicted = simulated_and_predicted(settings, 0.25)
    assert simulated == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("size", slow_but([0.1, 0.25, 0.4], 0.25))
def test_regularized_features_do_no_worse_than_predicted(size, antithetic):
    settings = {"estimator": "regularized", "antithetic": antithetic}
    simulated, predicted = simulated_and_predicted(settings, size)
    assert 0.5 * predicted < simulated < 1.01 * predicted


def test_the_number_of_features_counts_in_every_kind_of_pairs():
    norms = SquareNorms(torch.tensor([0.01, 1.0, 4.0]), torch.tensor([4.0, 1.0, 0.01]))
    plain = predicted({"estimator": "positive"}, norms)
    paired = predicted({"estimator": "hyperbolic"}, norms)
    # Lemma 2 at equal numbers of features.
    torch.testing.assert_close(paired / plain, (-torch.expm1(-norms.sum_H.double())).sqrt())
    torch.testing.assert_close(predicted(SETTINGS[3], norms), paired.flip(0))
    for settings in SETTINGS:
        half, full = predicted(settings, norms, 128), predicted(settings, norms, 512)
        torch.testing.assert_close(half, 2 * full)


@pytest.mark.parametrize("norm", [0.1, 5.5, 50.0])
def test_optimal_features_are_best_where_they_are_optimal(norm):
    norms = SquareNorms(torch.tensor([norm]), torch.tensor([norm]))
    assumed = [None, *(norm * factor for factor in (0.3, 0.97, 1.0, 1.03, 3.0))]
    errors = [predicted({"optimal_for": value}, norms).item() for value in assumed]
    assert min(errors) == errors[3]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_norm_gives_an_infinity_or_nan(settings):
    norm = torch.tensor([0.0, 1e-300, 1e-9, 1e2, 1e4, 1e300, math.inf], dtype=torch.float64)
    error = predicted(settings, SquareNorms(norm, norm))
    assert error.isfinite().all()
    assert error[-1] == LARGEST_ERROR
    if "optimal_for" not in settings:
        assert error[0] == 0


def brute_force(q: Tensor, k: Tensor, mask: Tensor, sign: int, causal: bool) -> Tensor:
    """The mean |q̂ ± k̂|² over the pairs of each sequence that see each other, one per head."""
    pairs = (q[:, :, :, None] + sign * k[:, :, None]).square().sum(-1) / q.shape[-1] ** 0.5
    real = (mask[:, None, :, None] & mask[:, None, None]).expand_as(pairs)
    real = real.tril() if causal else real
    return torch.stack([pairs[:, head][real[:, head]].mean() for head in range(q.shape[1])])


def ragged() -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys with means of their own for each sequence, and NaN in the padding."""
    mask = torch.arange(12) < torch.tensor([12, 5, 1, 0])[:, None]
    q, k = (normal(4, 3, 12, 8, seed=s) + 2 * normal(4, 3, 1, 8, seed=s + 2) for s in (0, 1))
    q, k = (x.masked_fill(~mask[:, None, :, None], math.nan) for x in (q, k))
    return q, k, mask


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_norms_are_the_means_over_the_pairs_that_see_each_other(dtype, tolerance, causal):
    q, k, mask = ragged()
    # A hole, so that places and counts of real positions differ.
    mask[0, 4:6] = False
    norms = SquareNorms.of(pair_sums(q.to(dtype), k.to(dtype), mask, causal=causal))
    for found_H, sign in ((norms.sum_H, 1), (norms.difference_H, -1)):
        expected_H = brute_force(q, k, mask, sign, causal)
        torch.testing.assert_close(found_H, expected_H, rtol=tolerance, atol=0)


def test_sums_add_up_over_batches():
    q, k, mask = ragged()
    parts = [pair_sums(q[n], k[n], mask[n], causal=True) for n in (slice(1), slice(1, 4))]
    torch.testing.assert_close(sum(parts), pair_sums(q, k, mask, causal=True))
    # Without a residue there is no norm.
    norms = SquareNorms.of(pair_sums(q, k, torch.zeros_like(mask), causal=False))
    assert not norms.sum_H.any() and not norms.difference_H.any()


def test_nothing_larger_than_the_queries_is_made():
    q, k = normal(2, 2, 300, 4), normal(2, 2, 300, 4, seed=1)
    with LargestTensor() as tensors:
        pair_sums(q, k, torch.ones(2, 300, dtype=torch.bool), causal=True)
    assert tensors.numel == q.numel()


# Passed by chance once in 300 runs by any of 5,000 statistics.
Z = 5.0
LAWS = pytest.mark.parametrize("sampling", RowSampling)


@cache
def blocks(sampling: RowSampling, row_norms: RowNorms = RowNorms.chi) -> Tensor:
    """Independent blocks of rows, (20,000, 8, 8)."""
    projection = Projection(BLOCKS * DIM, DIM, sampling=sampling, row_norms=row_norms)
    return projection.draw(seed=0, index=0).unflatten(0, (BLOCKS, DIM))


def directions(sampling: RowSampling) -> Tensor:
    return F.normalize(blocks(sampling), dim=-1)


def kolmogorov_smirnov(samples: Tensor, cumulative: Tensor) -> float:
    """√n times the largest distance of the distribution from `cumulative`, its own at a sample."""
    order = samples.argsort()
    steps = torch.arange(1, len(samples) + 1) / len(samples)
    return (cumulative[order] - steps).abs().max().item() * math.sqrt(len(samples))


def test_rows_are_orthogonal_within_a_block():
    rows = directions(RowSampling.orthogonal)
    assert (rows @ rows.mT - torch.eye(DIM)).abs().max() < 1e-5
    ragged = Projection(3 * DIM + 5, DIM, row_norms=RowNorms.sqrt_dim).draw(0, 0)
    for block in ragged.split(DIM):
        assert (block @ block.mT / DIM - torch.eye(len(block))).abs().max() < 1e-5


# A statistic of rows or of their directions, and its mean.
MOMENTS: list[tuple[Any, Callable[..., Tensor], Tensor | float]] = [
    # A QR without its sign correction fails here by a hundred standard errors.
    (blocks, lambda rows: rows, 0),
    (directions, lambda rows: rows, 0),
    (blocks, lambda rows: rows[..., :, None] * rows[..., None, :], torch.eye(DIM)),
]


@LAWS
@pytest.mark.parametrize(("rows_of", "statistic", "expected"), MOMENTS)
def test_rows_have_the_moments_of_their_law(rows_of, statistic, expected, sampling):
    assert largest_z(statistic(rows_of(sampling)), expected) < Z


@LAWS
def test_rows_are_standard_normal(sampling):
    for row in blocks(sampling).unbind(1):
        entries = row.flatten()
        # Passed by chance once in 25,000 times.
        assert kolmogorov_smirnov(entries, torch.special.ndtr(entries)) < 2.25


@LAWS
def test_norms_are_chi_distributed_or_one_number(sampling):
    half_squares = blocks(sampling).square().sum(dim=-1).flatten() / 2
    shape = torch.tensor(DIM / 2, dtype=torch.float64)
    assert kolmogorov_smirnov(half_squares, torch.special.gammainc(shape, half_squares)) < 2.25
    norms = blocks(sampling, RowNorms.sqrt_dim).norm(dim=-1)
    torch.testing.assert_close(norms, torch.full_like(norms, math.sqrt(DIM)), rtol=1e-12, atol=0)


@LAWS
def test_antithetic_rows_mirror_the_others(sampling):
    rows = Projection(30, DIM, sampling=sampling, antithetic=True).draw(3, 7)
    half = Projection(15, DIM, sampling=sampling).draw(3, 7)
    assert torch.equal(rows, torch.cat([half, -half]))


def test_draws_are_those_of_earlier_versions():
    expected = [
        [0.839103246279, 0.820187479817],
        [-1.437094886790, 1.470238225272],
        [-1.108686464577, 0.556354247519],
    ]
    rows = Projection(3, 2).draw(3, 7)
    torch.testing.assert_close(rows, torch.tensor(expected).to(rows), rtol=0, atol=1e-6)


@LAWS
def test_heads_of_width_one_have_rows_of_either_sign(sampling):
    rows = Projection(100, 1, sampling=sampling, row_norms=RowNorms.sqrt_dim).draw(0, 0)
    assert rows.unique().tolist() == [-1, 1]
