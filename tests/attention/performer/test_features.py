"""Feature maps: the kernels they stand for, and their gradients."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention import create
from protlm.attention.performer.features import FeatureMap, relu_features, softmax_features
from protlm.attention.performer.operands import inverse_of_weight
from protlm.attention.performer.projection import orthogonal_projection

DIM = 8


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projection(num_features: int, dim: int = DIM) -> Tensor:
    """A projection with a fixed seed."""
    return orthogonal_projection(num_features, dim, torch.Generator().manual_seed(5))


def test_products_are_the_positive_estimate_up_to_a_constant_of_the_query() -> None:
    queries, keys = softmax_features(DIM)
    rows = projection(20)
    q, k = normal(1, 1, 3, DIM), normal(1, 1, 5, DIM, seed=1)
    products = queries(q, rows) @ keys(k, rows).mT
    q_hat, k_hat = q[0, 0] / DIM**0.25, k[0, 0] / DIM**0.25
    exponents = (q_hat[:, None] + k_hat) @ rows.mT
    half_squares = (q_hat.square().sum(-1)[:, None] + k_hat.square().sum(-1)) / 2
    ratios = products[0, 0] / (exponents - half_squares[..., None]).exp().mean(-1)
    torch.testing.assert_close(ratios, ratios[:, :1].expand_as(ratios))


def test_key_features_are_bounded_and_keep_weight_at_large_norms() -> None:
    dim = 64
    queries, keys = softmax_features(dim)
    rows = projection(256, dim).float()
    x = 2.5 * normal(1, 1, 512, dim).float()
    assert keys(x, rows).max() <= math.exp(dim / 2)
    assert queries(x, rows).amax(dim=-1).eq(1).all()
    weights = queries(x, rows) @ keys(x, rows).mT
    # The first row of a causal map has the weight of one key only.
    assert inverse_of_weight(weights.flatten(2)[..., None]).all()


def test_features_of_a_position_depend_on_nothing_else() -> None:
    rows = projection(20).float()
    x = normal(2, 2, 6, DIM).float()
    for feature_map in (*softmax_features(DIM), relu_features(1e-3).keys):
        changed = x.clone()
        changed[:, :, 3:] *= 30
        changed[1] *= 5
        assert torch.equal(feature_map(x, rows)[0, :, :3], feature_map(changed, rows)[0, :, :3])


def test_relu_features_are_the_formula() -> None:
    x, rows = normal(1, 1, 7, DIM), projection(20)
    feature_map = relu_features(0.5).queries
    torch.testing.assert_close(feature_map(x, rows), (x @ rows.mT).clamp_min(0) + 0.5)
    torch.testing.assert_close(feature_map(x, None), x.clamp_min(0) + 0.5)


@pytest.mark.parametrize(
    ("feature_map", "num_features"),
    [
        (softmax_features(DIM).queries, 20),
        (softmax_features(DIM).keys, 20),
        (relu_features(1e-3).keys, 20),
        (relu_features(1e-3).keys, None),
    ],
    ids=["softmax queries", "softmax keys", "relu projected", "relu"],
)
def test_gradients_are_those_of_autograd(feature_map: FeatureMap, num_features: int | None) -> None:
    rows = None if num_features is None else projection(num_features)
    x = normal(1, 2, 7, DIM).requires_grad_()
    phi = feature_map(x, rows)
    dphi = normal(*phi.shape, seed=2)
    if feature_map == softmax_features(DIM).queries:
        # The maximum carries no gradient, because it cancels; so does the derivative along φ.
        dphi = dphi - (dphi * phi).sum(-1, keepdim=True) / phi.square().sum(-1, keepdim=True) * phi
    (expected,) = torch.autograd.grad(phi, x, dphi)
    found = feature_map.gradient(dphi, phi.detach(), x.detach(), rows)
    torch.testing.assert_close(found, expected)


def test_the_error_against_softmax_falls_with_the_root_of_the_features() -> None:
    counts = [32, 128, 512, 2048]
    dim, length = 16, 64
    q, k, v = (normal(1, 4, length, dim, seed=seed) for seed in range(3))
    # |q̂|² + |k̂|² is about 0.7: few features do for the estimate.
    q, k = 0.3 * q, 0.3 * k
    expected = F.scaled_dot_product_attention(q, k, v)
    inputs: dict[str, Any] = {
        "hidden_BLD": q[:, 0],
        "mask_BL": torch.ones(1, length, dtype=torch.bool),
        "causal": False,
    }
    errors = []
    for count in counts:
        squares = []
        for seed in range(8):
            mechanism = create(
                "performer_softmax",
                {"num_features": count},
                num_heads=4,
                head_dim=dim,
                model_dim=dim,
                max_length=length,
                seed=seed,
            )
            squares.append((mechanism(q, k, v, **inputs) - expected).square().mean())
        errors.append(torch.stack(squares).mean().sqrt())
    x = torch.tensor(counts).log()
    y = torch.stack(errors).log().to(x.dtype)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert -0.6 < slope < -0.4
