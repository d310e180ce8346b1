"""The ReLU kernel in O(L²): arXiv 2009.14794, A.4, with or without a projection."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CORE: dict[str, Any] = {}
HARD: dict[str, Any] | None = {"num_features": 20, "kernel_epsilon": 0.25, "redraw_every": 10}
FURTHER: list[dict[str, Any]] = [
    {"num_features": 20},
]


def is_linear_in_values(options: Mapping[str, Any]) -> bool:
    """Always."""
    return True


def rows_sum_to_one(options: Mapping[str, Any]) -> bool:
    """Always."""
    return True


def _features(x_BHLK: Tensor, mechanism: nn.Module, epsilon: float) -> Tensor:
    projection_RK = dict(mechanism.named_buffers()).get("projection")
    if projection_RK is not None:
        x_BHLK = torch.einsum("bhlk,rk->bhlr", x_BHLK, projection_RK.to(x_BHLK.dtype))
    return torch.where(x_BHLK > 0, x_BHLK, 0) + epsilon


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
    """Every output as a weighted mean over the keys it sees."""
    phi_q_BHLR = _features(q_BHLK, mechanism, options["kernel_epsilon"])
    phi_k_BHLR = _features(k_BHLK, mechanism, options["kernel_epsilon"])
    weights_BHLL = torch.einsum("bhir,bhjr->bhij", phi_q_BHLR, phi_k_BHLR) * visible_B1LL
    totals_BHL1 = weights_BHLL.sum(-1, keepdim=True)
    # A row that sees nothing is 0 / 1.
    totals_BHL1 = totals_BHL1 + (totals_BHL1 == 0)
    return (weights_BHLL / totals_BHL1) @ v_BHLC
