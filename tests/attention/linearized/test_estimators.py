"""Estimators of the softmax kernel and generalized kernels: means and variances over many draws.

A draw is a block of 8 rows, or one row where rows are independent; all of them are rows of one
mechanism, so that its own feature maps and its own `kernel` are what is tested. Formulas: Lemma 2
and Theorem 2 of arXiv 2009.14794, with x, y for q̂, k̂, z = x + y and Δ = x - y.
"""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import protlm.attention
from protlm.attention.linearized.base import Performer
from protlm.attention.linearized.features import FourierFeatures
from protlm.attention.linearized.positive import PositiveFeatures
from protlm.attention.ops.projection import Projection

DIM = 8
BLOCKS = 20_000
FEATURES = BLOCKS * DIM

ESTIMATORS: dict[str, dict[str, Any]] = {
    "positive": {},
    "hyperbolic": {"estimator": "hyperbolic"},
    "trigonometric": {"estimator": "trigonometric", "denominator_floor": 1e-3},
    "optimal": {"optimal_for": 2.0},
    "optimal antithetic": {"optimal_for": 2.0, "antithetic": True},
    "regularized": {"estimator": "regularized"},
}
# A row has two features: of itself and of its negative, or its sine and cosine.
PAIRED = {"hyperbolic", "trigonometric", "optimal antithetic"}


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def performer(
    options: Mapping[str, Any], *, name: str = "performer_softmax", num_features: int = FEATURES
) -> Performer:
    """A Performer with one head of width 8."""
    mechanism = protlm.attention.create(
        name,
        {"num_features": num_features, "redraw_every": None, **options},
        num_heads=1,
        head_dim=DIM,
        model_dim=DIM,
        max_length=1,
    )
    assert isinstance(mechanism, Performer)
    return mechanism


def estimates(mechanism: Performer, x_BK: Tensor, y_BK: Tensor, *, paired: bool = False) -> Tensor:
    """What each row alone estimates, RB: their mean is the mechanism's own `kernel`."""
    x_B11K, y_B11K = x_BK[:, None, None], y_BK[:, None, None]
    features_B11R = mechanism.query_features(x_B11K) * mechanism.key_features(y_B11K)
    shares_B11R = features_B11R / features_B11R.sum(dim=-1, keepdim=True)
    rows_BR = (shares_B11R * mechanism.kernel(x_B11K, y_B11K))[:, 0, 0]
    if paired:
        rows_BR = rows_BR.unflatten(-1, (2, -1)).sum(dim=1)
    return rows_BR.mT * rows_BR.shape[-1]


def softmax_estimates(
    estimator: str, law: str, x_BK: Tensor, y_BK: Tensor, *, num_features: int = FEATURES
) -> Tensor:
    """The same by an estimator of exp(x·y); a head scales what it gets by K^(-1/4)."""
    options = {**ESTIMATORS[estimator], "projection": law}
    mechanism = performer(options, num_features=num_features)
    scale = DIM**0.25
    return estimates(mechanism, x_BK * scale, y_BK * scale, paired=estimator in PAIRED)


def block_means(rows: Tensor) -> Tensor:
    """The estimates by 8 rows each."""
    return rows.unflatten(0, (-1, DIM)).mean(dim=1)


def vectors(square_norm: float) -> tuple[Tensor, Tensor]:
    """Three pairs with |z|² = `square_norm` and |Δ|² = 1; z in an orthant, in its negative, any."""
    generator = torch.Generator().manual_seed(1)
    positive = torch.rand(DIM, generator=generator, dtype=torch.float64)
    anywhere, *deltas = torch.randn(4, DIM, generator=generator, dtype=torch.float64)
    z_BK = F.normalize(torch.stack([positive, -positive, anywhere])) * math.sqrt(square_norm)
    delta_BK = F.normalize(torch.stack(deltas))
    return (z_BK + delta_BK) / 2, (z_BK - delta_BK) / 2


def largest_z(draws: Tensor, expected: Tensor) -> float:
    """How many standard errors the mean over the first axis is from what is expected, at most."""
    standard_error = draws.std(dim=0) / math.sqrt(len(draws))
    return ((draws.mean(dim=0) - expected).abs() / standard_error).max().item()


def relative_variance(draws: Tensor, expected: Tensor) -> Tensor:
    """The mean square of the relative error."""
    return (draws / expected - 1).square().mean(dim=0)


def square(x: Tensor) -> Tensor:
    """|x|²."""
    return x.square().sum(dim=-1)


def regularized_kernel(x_BK: Tensor, y_BK: Tensor) -> Tensor:
    """SMREG, exp(-(|x|² + |y|²) / 2) ₀F₁(; K/2; K|z|²/4)."""
    terms = torch.arange(60, dtype=torch.float64)
    half = torch.tensor(DIM / 2, dtype=torch.float64)
    logs = terms * (DIM / 4 * square(x_BK + y_BK))[:, None].log()
    logs = logs - torch.lgamma(terms + 1) - torch.lgamma(terms + half) + torch.lgamma(half)
    return (logs.logsumexp(dim=1) - (square(x_BK) + square(y_BK)) / 2).exp()


def expected_kernel(estimator: str, x_BK: Tensor, y_BK: Tensor) -> Tensor:
    """What the estimator is an unbiased estimate of."""
    if estimator == "regularized":
        return regularized_kernel(x_BK, y_BK)
    return (x_BK * y_BK).sum(dim=-1).exp()


@pytest.mark.parametrize("law", ["orthogonal", "iid"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimates_are_unbiased(estimator: str, law: str) -> None:
    x, y = vectors(1.5)
    draws = block_means(softmax_estimates(estimator, law, x, y))
    assert largest_z(draws, expected_kernel(estimator, x, y)) < 4


@pytest.mark.parametrize("law", ["hadamard", "givens"])
@pytest.mark.parametrize("estimator", ["positive", "hyperbolic", "trigonometric", "regularized"])
def test_nearly_uniform_rows_are_nearly_unbiased(estimator: str, law: str) -> None:
    x, y = vectors(1.5)
    mean = softmax_estimates(estimator, law, x, y).mean(dim=0)
    assert (mean / expected_kernel(estimator, x, y) - 1).abs().max() < 0.02


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_orthogonal_rows_have_less_variance_than_iid_rows(estimator: str) -> None:
    x, y = vectors(1.0)
    expected = expected_kernel(estimator, x, y)
    iid, orthogonal = (
        relative_variance(block_means(softmax_estimates(estimator, law, x, y)), expected).mean()
        for law in ("iid", "orthogonal")
    )
    assert orthogonal < 0.95 * iid


def test_the_variance_of_orthogonal_rows_is_below_the_bound_of_theorem_2() -> None:
    z2 = 1.0
    x, y = vectors(z2)
    draws = softmax_estimates("positive", "orthogonal", x, y, num_features=5 * FEATURES)
    found = relative_variance(block_means(draws), expected_kernel("positive", x, y)).mean()
    iid = math.exp(z2) * (1 - math.exp(-z2)) / DIM
    assert found < iid - 2 * (DIM - 1) / (DIM * (DIM + 2)) * (1 - math.exp(-z2 / 2)) ** 2


@pytest.mark.parametrize("square_norm", [0.5, 3.0])
def test_the_regularized_kernel_is_below_the_softmax_kernel(square_norm: float) -> None:
    x, y = vectors(square_norm)
    draws = block_means(softmax_estimates("regularized", "orthogonal", x, y))
    expected = regularized_kernel(x, y)
    assert largest_z(draws, expected) < 4
    assert (expected < expected_kernel("positive", x, y)).all()


def expected_generalized(kernel: str, x_BK: Tensor, y_BK: Tensor) -> Tensor:
    """E f(ω·x) f(ω·y) for ω ~ N(0, I) in closed form."""
    norms = (square(x_BK) * square(y_BK)).sqrt()
    angle = F.cosine_similarity(x_BK, y_BK).acos()
    sine, cosine = angle.sin(), angle.cos()
    quadratic = 3 * sine * cosine + (math.pi - angle) * (1 + 2 * cosine**2)
    gaussians = (-square(x_BK - y_BK) / 2).exp() + (-square(x_BK + y_BK) / 2).exp()
    return {
        "relu": norms / (2 * math.pi) * (sine + (math.pi - angle) * cosine),
        "square_relu": norms**2 / (2 * math.pi) * quadratic,
        "abs": 2 / math.pi * norms * (sine + cosine * (math.pi / 2 - angle)),
        "identity": (x_BK * y_BK).sum(dim=-1),
        "cos": gaussians / 2,
        "exp": (square(x_BK + y_BK) / 2).exp(),
    }[kernel]


def generalized_draws(options: Mapping[str, Any], x_BK: Tensor, y_BK: Tensor) -> Tensor:
    """The estimates of a generalized kernel by 8 rows each."""
    options = {"kernel_epsilon": 0.0, "normalizer": "rmsnorm", **options}
    return block_means(estimates(performer(options, name="performer_generalized"), x_BK, y_BK))


@pytest.mark.parametrize("law", ["orthogonal", "iid"])
@pytest.mark.parametrize("kernel", ["relu", "square_relu", "abs", "identity", "cos", "exp"])
def test_generalized_kernels_have_their_closed_forms(kernel: str, law: str) -> None:
    x, y = vectors(1.5)
    draws = generalized_draws({"kernel": kernel, "projection": law}, x, y)
    assert largest_z(draws, expected_generalized(kernel, x, y)) < 4


@pytest.mark.parametrize("dim", [64, 512])
def test_key_features_without_a_reference_are_bounded(dim: int) -> None:
    feature_map = PositiveFeatures(Projection(256, dim).draw(seed=5, index=0).float())
    x = 2.5 * normal(1, 1, 512, dim).float()
    assert feature_map.keys(x).phi_BHLR.max() <= math.exp(min(dim / 2, 60))
    assert feature_map.queries(x).phi_BHLR.amax(dim=-1).eq(1).all()


@pytest.mark.parametrize("distance", [0.3, 1.0, 2.0])
def test_fourier_features_have_the_mean_and_the_variance_of_the_paper(distance: float) -> None:
    rows = 20_000
    features = FourierFeatures(Projection(rows, DIM, sampling="iid").draw(seed=0, index=0))
    x = normal(1, 1, 1, DIM)
    direction = normal(1, 1, 1, DIM, seed=1)
    y = x + distance * direction / direction.norm()
    phi_x, phi_y = features.queries(x).phi_BHLR, features.keys(y).phi_BHLR
    kernel = math.exp(-(distance**2) / 2)
    estimates = rows * (phi_x * phi_y).unflatten(-1, (2, rows)).sum(dim=-2).flatten()
    # Var cos(ω·Δ) = (1 - exp(-|Δ|²))² / 2.
    deviation = (1 - kernel**2) / math.sqrt(2)
    assert abs(estimates.mean() - kernel) < 4 * deviation / math.sqrt(rows)
    assert estimates.std() == pytest.approx(deviation, rel=0.05)
    assert not features.log_factor(x).any()
    norms = features.keys(30 * normal(2, 2, 5, DIM)).phi_BHLR.norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))
