"""Generalized kernels: arXiv 2009.14794, A.4 and D.3, with or without a projection."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.attention.truth import Given, weights

# As functions of a number; the derivatives are autograd's.
KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: torch.where(x > 0, x, 0),
    "elu": lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
    "exp": lambda x: math.e**x,
    "abs": lambda x: torch.where(x > 0, x, -x),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "tanh": lambda x: 1 - 2 / ((2 * x).exp() + 1),
    "cos": lambda x: (x + math.pi / 2).sin(),
    "square_relu": lambda x: torch.where(x > 0, x * x, 0),
    "identity": lambda x: x,
}


@weights(
    {},
    {"num_features": 20, "kernel": "exp", "row_norms": "sqrt_dim", "antithetic": True},
    further=[
        {"num_features": None},
        {"num_features": 20, "kernel": "elu", "projection": "iid"},
        {"num_features": None, "kernel": "exp"},
        {"num_features": 20, "kernel": "abs", "projection": "givens"},
        {"num_features": 20, "kernel": "sigmoid", "projection": "hadamard"},
        {"num_features": None, "kernel": "square_relu", "kernel_epsilon": 0.25},
        {"num_features": 20, "kernel": "gelu", "denominator_floor": 2.0},
        {"num_features": None, "kernel": "tanh", "denominator_floor": 2.0},
        {"num_features": 20, "kernel": "cos", "denominator_floor": 5.0},
        {"num_features": 20, "kernel": "identity", "normalizer": "rmsnorm"},
        {"num_features": None, "normalizer": "rmsnorm"},
    ],
)
def performer_generalized(given: Given) -> Tensor:
    """φ(q)·φ(k), φ(x) = f(ω·x) + ε."""
    rows_RK = given.tensors.get("projection", torch.eye(given.head_dim).double())
    f, epsilon = KERNELS[given.options["kernel"]], given.options["kernel_epsilon"]
    phi_q, phi_k = (f(x @ rows_RK.mT) + epsilon for x in (given.q_BHLK, given.k_BHLK))
    return phi_q @ phi_k.mT
