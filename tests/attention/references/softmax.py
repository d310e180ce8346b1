"""Softmax attention in O(L²), from its formula."""

import math
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
    exponents_BHLL = torch.einsum("bhik,bhjk->bhij", q_BHLK, k_BHLK) / math.sqrt(q_BHLK.shape[-1])
    exponents_BHLL = exponents_BHLL - exponents_BHLL.detach().amax(-1, keepdim=True)
    weights_BHLL = exponents_BHLL.exp() * visible_B1LL
    totals_BHL1 = weights_BHLL.sum(-1, keepdim=True)
    # A row that sees nothing is 0 / 1.
    totals_BHL1 = totals_BHL1 + (totals_BHL1 == 0)
    return (weights_BHLL / totals_BHL1) @ v_BHLC
