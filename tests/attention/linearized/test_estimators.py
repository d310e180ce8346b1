"""Estimators of the softmax kernel and generalized kernels: means and variances over many draws.

A draw is a block of 8 rows, or one row where rows are independent; all of them are rows of one
mechanism, so that its own feature maps and its own `kernel` are what is tested. Formulas: Lemma 2
and Theorem 2 of arXiv 2009.14794, with x, y for q̂, k̂, z = x + y and Δ = x - y.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import protlm.attention
from protlm.attention.linearized.base import Performer

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


@pytest.mark.parametrize("estimator", ["positive", "hyperbolic", "trigonometric", "optimal"])
def test_the_error_of_the_output_falls_with_the_root_of_the_features(estimator: str) -> None:
    counts, repeats, length = torch.tensor([32, 128, 512, 2048]), 24, 32
    generator = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, 1, 1, length, DIM, generator=generator)
    # |q̂|² + |k̂|² is about 1/2: few features do for the estimate.
    q, k = 0.3 * q, 0.3 * k
    target = F.scaled_dot_product_attention(q, k, v)
    errors = []
    for count in counts.tolist():
        mechanism = performer(ESTIMATORS[estimator], num_features=count)
        squares = []
        for index in range(repeats):
            mechanism.redraw(index)
            mask_BL = torch.ones(1, length, dtype=torch.bool)
            out = mechanism(q, k, v, hidden_BLD=v[0], mask_BL=mask_BL, causal=False)
            squares.append((out - target).square().mean())
        errors.append(torch.stack(squares).mean().sqrt())
    logs = torch.stack([counts.log(), torch.stack(errors).log()])
    covariance = torch.cov(logs)
    assert abs(covariance[0, 1] / covariance[0, 0] + 0.5) < 0.1


def test_hyperbolic_features_are_positive_ones_of_mirrored_rows() -> None:
    hyperbolic, mirrored = (
        performer(options, num_features=16)
        for options in ({"estimator": "hyperbolic"}, {"antithetic": True})
    )
    x_1HLK = torch.stack(vectors(1.5))[None]
    assert torch.equal(hyperbolic.kernel(x_1HLK, x_1HLK), mirrored.kernel(x_1HLK, x_1HLK))


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


def expected_by_quadrature(kernel: str, x_BK: Tensor, y_BK: Tensor) -> Tensor:
    """The same for kernels without a closed form: the plane of x and y by Gauss and Hermite."""
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(100))
    weights = weights / weights.sum()
    norm_x, norm_y = (square(v_BK).sqrt()[:, None, None] for v_BK in (x_BK, y_BK))
    angle = F.cosine_similarity(x_BK, y_BK).acos()[:, None, None]
    u = norm_x * nodes[:, None]
    w = norm_y * (angle.cos() * nodes[:, None] + angle.sin() * nodes)
    f = {
        "sigmoid": lambda t: 1 / (1 + torch.exp(-t)),
        "tanh": lambda t: 1 - 2 / (1 + torch.exp(2 * t)),
        "gelu": lambda t: t * (1 + torch.erf(t / math.sqrt(2))) / 2,
        "elu": lambda t: torch.where(t > 0, t + 1, torch.exp(t)),
    }[kernel]
    return torch.einsum("bij,i,j->b", f(u) * f(w), weights, weights)


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


@pytest.mark.parametrize("kernel", ["sigmoid", "tanh", "gelu", "elu"])
def test_generalized_kernels_are_their_integrals(kernel: str) -> None:
    x, y = vectors(1.5)
    draws = generalized_draws({"kernel": kernel}, x, y)
    assert largest_z(draws, expected_by_quadrature(kernel, x, y)) < 4


def test_the_kernel_with_an_epsilon_has_its_expectation() -> None:
    epsilon = 0.5
    x, y = vectors(1.5)
    draws = generalized_draws({"kernel": "relu", "kernel_epsilon": epsilon}, x, y)
    # E relu(ω·x) = |x| / √(2π).
    linear = (square(x).sqrt() + square(y).sqrt()) / math.sqrt(2 * math.pi)
    expected = expected_generalized("relu", x, y) + epsilon * linear + epsilon**2
    assert largest_z(draws, expected) < 4
