"""AFT-simple by its formula, position by position: arXiv 2105.14103, "AFT-simple"."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CORE: dict[str, Any] = {}
HARD: dict[str, Any] | None = None
FURTHER: list[dict[str, Any]] = []


def is_linear_in_values(options: Mapping[str, Any]) -> bool:
    """It is, but it has as many value channels as key channels: the identity does not fit."""
    return False


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
    """Every output as a gated mean over the keys it sees, weighted by their exponentials."""
    rows = []
    for position in range(q_BHLK.shape[2]):
        seen = visible_B1LL[:, :, position, :, None]
        weights = k_BHLK.exp() * seen
        # A row that sees nothing is 0 / 1.
        total = weights.sum(2) + ~seen.any(2)
        rows.append((weights * v_BHLC).sum(2) / total)
    return torch.sigmoid(q_BHLK) * torch.stack(rows, dim=2)
