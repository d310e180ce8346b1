"""Hedgehog in O(L²): arXiv 2402.04347, section 4.1, with a matrix W for each head."""

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


def _features(x_BHLK: Tensor, matrix_HRK: Tensor) -> Tensor:
    learned_BHLR = torch.einsum("hrk,bhlk->bhlr", matrix_HRK, x_BHLK)
    return torch.cat([learned_BHLR.exp(), (-learned_BHLR).exp()], dim=-1)


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
    matrices = dict(mechanism.named_parameters())
    phi_q_BHLR = _features(q_BHLK, matrices["query_map"])
    phi_k_BHLR = _features(k_BHLK, matrices["key_map"])
    weights_BHLL = torch.einsum("bhir,bhjr->bhij", phi_q_BHLR, phi_k_BHLR) * visible_B1LL
    totals_BHL1 = weights_BHLL.sum(-1, keepdim=True)
    # A row that sees nothing is 0 / 1.
    return (weights_BHLL / (totals_BHL1 + (totals_BHL1 == 0))) @ v_BHLC
