"""Feature maps: the kernels they estimate, and their gradients."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention.linearized.features import (
    NONLINEARITIES,
    FeatureMapFactory,
    FourierFeatures,
    GeneralizedFeatures,
    TrigonometricFeatures,
)
from protlm.attention.linearized.positive import PositiveFeatures
from protlm.attention.ops.projection import Projection

DIM = 8
FACTORIES: dict[str, FeatureMapFactory] = {
    "positive": PositiveFeatures,
    "optimal": partial(PositiveFeatures, stretch=1.3),
    "trigonometric": TrigonometricFeatures,
    "fourier": FourierFeatures,
    **{
        kernel: partial(GeneralizedFeatures, kernel=kernel, epsilon=1e-3)
        for kernel in NONLINEARITIES
    },
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projection(num_features: int, dim: int = DIM) -> Tensor:
    """A projection with a fixed seed."""
    return Projection(num_features, dim).draw(seed=5, index=0)


@pytest.mark.parametrize("dim", [64, 512])
def test_key_features_without_a_reference_are_bounded(dim: int) -> None:
    feature_map = PositiveFeatures(projection(256, dim).float())
    x = 2.5 * normal(1, 1, 512, dim).float()
    assert feature_map.keys(x).phi_BHLR.max() <= math.exp(min(dim / 2, 60))
    assert feature_map.queries(x).phi_BHLR.amax(dim=-1).eq(1).all()


@pytest.mark.parametrize("name", FACTORIES)
def test_features_of_a_position_depend_on_nothing_else(name: str) -> None:
    feature_map = FACTORIES[name](projection(20).float())
    x = normal(2, 2, 6, DIM).float()
    changed = x.clone()
    changed[:, :, 3:] *= 30
    changed[1] *= 5
    for side in (feature_map.queries, feature_map.keys):
        assert torch.equal(side(x).phi_BHLR[0, :, :3], side(changed).phi_BHLR[0, :, :3])


@pytest.mark.parametrize("name", FACTORIES)
def test_pullbacks_are_the_gradients_of_autograd(name: str) -> None:
    feature_map = FACTORIES[name](projection(20))
    for side in (feature_map.queries, feature_map.keys):
        x = normal(1, 2, 7, DIM)
        phi, pullback = side(x)
        dphi = normal(*phi.shape, seed=2)
        if name in ("positive", "optimal"):
            # The maximum carries no gradient, because it cancels; nor, then, does the derivative
            # along φ.
            dphi = (
                dphi - (dphi * phi).sum(-1, keepdim=True) / phi.square().sum(-1, keepdim=True) * phi
            )
        found = pullback(dphi.clone())
        assert_is_gradient(side, x, dphi, found)


def assert_is_gradient(side: Any, x: Tensor, dphi: Tensor, found: Tensor) -> None:
    """Central differences along random directions agree with the gradient found."""
    step = 1e-6
    for seed in range(3):
        direction = normal(*x.shape, seed=seed + 10)
        above, below = (side(x + sign * step * direction).phi_BHLR for sign in (1, -1))
        expected = ((above - below) / (2 * step) * dphi).sum()
        torch.testing.assert_close((found * direction).sum(), expected, rtol=1e-6, atol=1e-7)


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


def test_elu_plus_1_keeps_the_digits_of_small_features() -> None:
    x = torch.linspace(-80, 20, 1001)
    expected = torch.where(x > 0, x + 1, x.double().clamp(max=0).exp())
    found = NONLINEARITIES["elu"].value(x).double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FACTORIES)
def test_the_number_of_features_is_told(name: str) -> None:
    feature_map = FACTORIES[name](projection(20))
    assert feature_map.keys(normal(1, 1, 2, DIM)).phi_BHLR.shape[-1] == feature_map.num_features(
        DIM
    )
