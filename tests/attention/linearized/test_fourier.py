"""Random Fourier features of a Gaussian kernel, and elu + 1 where it is small."""

import math

import pytest
import torch
from torch import Tensor

from protlm.attention.linearized.generalized import NONLINEARITIES
from protlm.attention.linearized.trigonometric import FourierFeatures
from protlm.attention.ops.projection import Projection

DIM = 8


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("distance", [0.3, 1.0, 2.0])
def test_estimates_have_the_mean_and_the_variance_of_the_paper(distance: float) -> None:
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


def test_features_are_unit_vectors() -> None:
    features = FourierFeatures(Projection(12, DIM).draw(seed=0, index=0))
    for side in (features.queries, features.keys):
        phi_BHLR = side(30 * normal(2, 2, 5, DIM)).phi_BHLR
        assert phi_BHLR.shape[-1] == 24
        torch.testing.assert_close(phi_BHLR.norm(dim=-1), torch.ones(2, 2, 5, dtype=torch.float64))


def test_the_pullback_is_the_gradient_of_autograd() -> None:
    rows_RK = Projection(12, DIM).draw(seed=0, index=0)
    x = normal(2, 2, 5, DIM).requires_grad_()
    angles = x @ rows_RK.mT
    expected_phi = torch.cat([angles.sin(), angles.cos()], dim=-1) / math.sqrt(12)
    phi, pullback = FourierFeatures(rows_RK).keys(x.detach())
    torch.testing.assert_close(phi, expected_phi)
    dphi = normal(*phi.shape, seed=2)
    (expected,) = torch.autograd.grad(expected_phi, x, dphi)
    torch.testing.assert_close(pullback(dphi), expected)


def test_elu_plus_1_keeps_the_digits_of_small_features() -> None:
    x = torch.linspace(-80, 20, 1001)
    expected = torch.where(x > 0, x + 1, x.double().clamp(max=0).exp())
    found = NONLINEARITIES["elu"].value(x).double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
