"""The textbook FAVOR+ estimates in O(L²): arXiv 2009.14794, Lemma 1, with the mechanism's rows."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CORE: dict[str, Any] = {}
HARD: dict[str, Any] | None = {
    "num_features": 20,
    "optimal_for": 4.0,
    "antithetic": True,
    "projection": "givens",
}
FURTHER: list[dict[str, Any]] = [
    {"num_features": 20},
    {"num_features": 20, "estimator": "hyperbolic", "projection": "iid"},
    {"num_features": 20, "estimator": "regularized", "projection": "hadamard"},
    {"num_features": 40, "estimator": "trigonometric", "denominator_floor": 20.0},
    {"num_features": 40, "estimator": "trigonometric", "normalizer": "rmsnorm"},
    {"num_features": 20, "normalizer": "rmsnorm"},
]


def is_linear_in_values(options: Mapping[str, Any]) -> bool:
    """An output norm is no linear function of the values."""
    return options["normalizer"] == "denominator"


def rows_sum_to_one(options: Mapping[str, Any]) -> bool:
    """A floor under the denominator makes some rows smaller."""
    return is_linear_in_values(options) and options["denominator_floor"] is None


def _positive_weights(
    q_BHLK: Tensor, k_BHLK: Tensor, rows_RK: Tensor, square_norm: float | None
) -> Tensor:
    """Means over the rows of Lemma 1's features, or of arXiv 2205.15317's with their A."""
    width = q_BHLK.shape[-1]
    stretch, exponent = 1.0, 0.0
    if square_norm is not None:
        root = math.sqrt((2 * square_norm + width) ** 2 + 8 * width * square_norm)
        rho = (root - 2 * square_norm - width) / (4 * square_norm)
        exponent = (1 - 1 / rho) / 8
        stretch = math.sqrt(1 - 4 * exponent)
    features = []
    for x_BHLK in (q_BHLK, k_BHLK):
        half_square_BHL1 = x_BHLK.square().sum(-1, keepdim=True) / 2
        logits_BHLR = stretch * torch.einsum("bhlk,rk->bhlr", x_BHLK, rows_RK) - half_square_BHL1
        features.append((logits_BHLR + exponent * rows_RK.square().sum(-1)).exp())
    return stretch**width * torch.einsum("bhir,bhjr->bhij", *features) / len(rows_RK)


def _trigonometric_weights(q_BHLK: Tensor, k_BHLK: Tensor, rows_RK: Tensor) -> Tensor:
    """Means over the rows of the cosine of the difference, without the factor of the query."""
    query_angles_BHLR, key_angles_BHLR = (
        torch.einsum("bhlk,rk->bhlr", x_BHLK, rows_RK) for x_BHLK in (q_BHLK, k_BHLK)
    )
    cosines_BHLL = sum(
        torch.einsum("bhir,bhjr->bhij", f(query_angles_BHLR), f(key_angles_BHLR)) / len(rows_RK)
        for f in (torch.sin, torch.cos)
    )
    factor_BH1L = (k_BHLK.square().sum(-1) / 2).exp()[:, :, None]
    return cosines_BHLL * factor_BH1L


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
    rows_RK = mechanism.get_buffer("projection").to(q_BHLK.dtype)
    scale = q_BHLK.shape[-1] ** -0.25
    q_BHLK, k_BHLK = q_BHLK * scale, k_BHLK * scale
    if options["estimator"] == "trigonometric":
        weights_BHLL = _trigonometric_weights(q_BHLK, k_BHLK, rows_RK)
    else:
        weights_BHLL = _positive_weights(q_BHLK, k_BHLK, rows_RK, options["optimal_for"])
    weights_BHLL = weights_BHLL * visible_B1LL
    sums_BHLC = weights_BHLL @ v_BHLC
    if options["normalizer"] == "rmsnorm":
        squares_BHL1 = sums_BHLC.square().mean(-1, keepdim=True)
        return sums_BHLC / (squares_BHL1 + (squares_BHL1 == 0)).sqrt()
    totals_BHL1 = weights_BHLL.sum(-1, keepdim=True)
    if options["denominator_floor"] is not None:
        totals_BHL1 = totals_BHL1.clamp(min=options["denominator_floor"])
    # A row that sees nothing is 0 / 1.
    return sums_BHLC / (totals_BHL1 + (totals_BHL1 == 0))
