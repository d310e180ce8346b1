"""The predicted error of an estimated weight, against the estimates that the mechanism makes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention.linearized.variance import (
    LARGEST_ERROR,
    SquareNorms,
    pair_sums,
    relative_error,
)
from protlm.attention.performer_softmax import PerformerSoftmax

DIM, DRAWS = 8, 400_000

SETTINGS: list[dict[str, Any]] = [
    {"estimator": "positive"},
    {"estimator": "positive", "antithetic": True},
    {"estimator": "hyperbolic"},
    {"estimator": "trigonometric", "denominator_floor": 1e-6},
    {"estimator": "positive", "optimal_for": 1.2},
    {"estimator": "positive", "optimal_for": 6.0},
    {"estimator": "positive", "optimal_for": 1.2, "antithetic": True},
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def predicted(settings: dict[str, Any], norms: SquareNorms, num_features: int = 256) -> Tensor:
    """The relative error of a mechanism with heads of 64."""
    return relative_error(
        PerformerSoftmax(head_dim=64, num_features=num_features, **settings), norms
    )


def simulated_and_predicted(settings: dict[str, Any], size: float) -> tuple[float, float]:
    """The relative error of one draw, for one query and one key: measured, and as predicted."""
    mechanism = PerformerSoftmax(
        head_dim=DIM, num_features=2 * DRAWS, projection="iid", redraw_every=None, **settings
    )
    q, k = size * DIM**0.25 * normal(2, 1, 1, 1, DIM, seed=1)
    norms = SquareNorms.of(pair_sums(q, k, torch.ones(1, 1, dtype=torch.bool), causal=False))
    if mechanism.estimator != "regularized":
        weight = math.exp(q.flatten() @ k.flatten() / DIM**0.5)
        assert mechanism.kernel(q, k).item() == pytest.approx(weight, rel=0.02)
    # Constant factors of the features cancel between the deviation and the mean.
    draws = (mechanism.query_features(q) * mechanism.key_features(k)).flatten()
    predicted = relative_error(mechanism, norms).item() * math.sqrt(2 * DRAWS)
    if mechanism.antithetic or mechanism.estimator == "trigonometric":
        draws, predicted = draws.unflatten(0, (2, -1)).mean(0), predicted / math.sqrt(2)
    return float(draws.std() / draws.mean()), predicted


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_prediction_is_the_variance_of_estimates(settings: dict[str, Any]) -> None:
    simulated, predicted = simulated_and_predicted(settings, 0.25)
    assert simulated == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("size", [0.1, 0.25, 0.4])
def test_regularized_features_do_no_worse_than_predicted(size: float, antithetic: bool) -> None:
    settings = {"estimator": "regularized", "antithetic": antithetic}
    simulated, predicted = simulated_and_predicted(settings, size)
    assert 0.5 * predicted < simulated < 1.01 * predicted


def test_the_number_of_features_counts_in_every_kind_of_pairs() -> None:
    norms = SquareNorms(torch.tensor([0.01, 1.0, 4.0]), torch.tensor([4.0, 1.0, 0.01]))
    plain = predicted({"estimator": "positive"}, norms)
    paired = predicted({"estimator": "hyperbolic"}, norms)
    # Lemma 2 at equal numbers of features.
    torch.testing.assert_close(paired / plain, (-torch.expm1(-norms.sum_H.double())).sqrt())
    circular = predicted(SETTINGS[3], norms)
    torch.testing.assert_close(circular, paired.flip(0))
    for settings in SETTINGS:
        half, full = predicted(settings, norms, 128), predicted(settings, norms, 512)
        torch.testing.assert_close(half, 2 * full)


@pytest.mark.parametrize("norm", [0.1, 5.5, 50.0])
def test_optimal_features_are_best_where_they_are_optimal(norm: float) -> None:
    norms = SquareNorms(torch.tensor([norm]), torch.tensor([norm]))
    assumed = [None, *(norm * factor for factor in (0.3, 0.97, 1.0, 1.03, 3.0))]
    errors = [predicted({"optimal_for": value}, norms).item() for value in assumed]
    assert min(errors) == errors[3]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_norm_gives_an_infinity_or_nan(settings: dict[str, Any]) -> None:
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
    heads = range(q.shape[1])
    return torch.stack([pairs[:, head][real[:, head]].mean() for head in heads])


def ragged(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys with means of their own for each sequence, and NaN in the padding."""
    mask = torch.arange(12) < torch.tensor([12, 5, 1, 0])[:, None]
    q, k = (normal(4, 3, 12, 8, seed=s) + 2 * normal(4, 3, 1, 8, seed=s + 2) for s in (0, 1))
    q, k = (x.masked_fill(~mask[:, None, :, None], math.nan).to(dtype) for x in (q, k))
    return q, k, mask


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_norms_are_the_means_over_the_pairs_that_see_each_other(
    dtype: torch.dtype, tolerance: float, causal: bool
) -> None:
    q, k, mask = ragged()
    # A hole, so that places and counts of real positions differ.
    mask[0, 4:6] = False
    norms = SquareNorms.of(pair_sums(q.to(dtype), k.to(dtype), mask, causal=causal))
    tolerances: dict[str, Any] = {"rtol": tolerance, "atol": 0}
    torch.testing.assert_close(norms.sum_H, brute_force(q, k, mask, 1, causal), **tolerances)
    torch.testing.assert_close(
        norms.difference_H, brute_force(q, k, mask, -1, causal), **tolerances
    )


def test_sums_add_up_over_batches() -> None:
    q, k, mask = ragged()
    parts = sum(
        pair_sums(q[rows], k[rows], mask[rows], causal=True) for rows in (slice(1), slice(1, 4))
    )
    torch.testing.assert_close(parts, pair_sums(q, k, mask, causal=True))


def test_without_a_residue_there_is_no_norm() -> None:
    q, k, mask = ragged()
    norms = SquareNorms.of(pair_sums(q, k, torch.zeros_like(mask), causal=False))
    assert not norms.sum_H.any() and not norms.difference_H.any()


def test_nothing_larger_than_the_queries_is_made(largest_tensor: Any) -> None:
    q, k = normal(2, 2, 300, 4), normal(2, 2, 300, 4, seed=1)
    with largest_tensor:
        pair_sums(q, k, torch.ones(2, 300, dtype=torch.bool), causal=True)
    assert largest_tensor.numel == q.numel()
