"""Generalized kernels in O(L²): arXiv 2009.14794, A.4 and D.3, with or without a projection."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

CORE: dict[str, Any] = {}
HARD: dict[str, Any] | None = {
    "num_features": 20,
    "kernel": "exp",
    "row_norms": "sqrt_dim",
    "antithetic": True,
}
FURTHER: list[dict[str, Any]] = [
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
]

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


def is_linear_in_values(options: Mapping[str, Any]) -> bool:
    """An output norm is no linear function of the values."""
    return options["normalizer"] == "denominator"


def rows_sum_to_one(options: Mapping[str, Any]) -> bool:
    """A floor under the denominator makes some rows smaller."""
    return is_linear_in_values(options) and options["denominator_floor"] is None


def _features(x_BHLK: Tensor, mechanism: nn.Module, options: Mapping[str, Any]) -> Tensor:
    rows_RK = dict(mechanism.named_buffers()).get("projection")
    if rows_RK is None:
        return KERNELS[options["kernel"]](x_BHLK) + options["kernel_epsilon"]
    projected_BHLR = torch.einsum("bhlk,rk->bhlr", x_BHLK, rows_RK.to(x_BHLK.dtype))
    return KERNELS[options["kernel"]](projected_BHLR) + options["kernel_epsilon"]


def output(
    mechanism: nn.Module,
    options: Mapping[str, Any],
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    *,
    hidden_BLD: Tensor,
    visible_B1LL: Tensor,
    causal: bool,
) -> Tensor:
    """Every output as a weighted mean over the keys it sees, or as their sum over its norm."""
    features = [_features(x_BHLK, mechanism, options) for x_BHLK in (q_BHLK, k_BHLK)]
    weights_BHLL = torch.einsum("bhir,bhjr->bhij", *features) * visible_B1LL
    sums_BHLC = weights_BHLL @ v_BHLC
    if options["normalizer"] == "rmsnorm":
        squares_BHL1 = sums_BHLC.square().mean(-1, keepdim=True)
        return sums_BHLC / (squares_BHL1 + (squares_BHL1 == 0)).sqrt()
    totals_BHL1 = weights_BHLL.sum(-1, keepdim=True)
    if options["denominator_floor"] is not None:
        totals_BHL1 = totals_BHL1.clamp(min=options["denominator_floor"])
    # A row that sees nothing is 0 / 1.
    return sums_BHLC / (totals_BHL1 + (totals_BHL1 == 0))
