"""Linear attention in O(L²): arXiv 2006.16236, equations 5 and 7."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CORE: dict[str, Any] = {}
HARD: dict[str, Any] | None = None
FURTHER: list[dict[str, Any]] = []


def is_linear_in_values(options: Mapping[str, Any]) -> bool:
    """Always."""
    return True


def rows_sum_to_one(options: Mapping[str, Any]) -> bool:
    """Always."""
    return True


def _features(x_BHLK: Tensor) -> Tensor:
    # elu(x) + 1, with 0 where the branch that is not taken could overflow.
    return torch.where(x_BHLK > 0, x_BHLK + 1, x_BHLK.clamp(max=0).exp())


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
    phi_q_BHLK, phi_k_BHLK = _features(q_BHLK), _features(k_BHLK)
    weights_BHLL = torch.einsum("bhik,bhjk->bhij", phi_q_BHLK, phi_k_BHLK) * visible_B1LL
    totals_BHL1 = weights_BHLL.sum(-1, keepdim=True)
    # A row that sees nothing is 0 / 1.
    totals_BHL1 = totals_BHL1 + (totals_BHL1 == 0)
    return (weights_BHLL / totals_BHL1) @ v_BHLC
