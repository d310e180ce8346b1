"""AFT-local by its formula, one weight for every pair and channel: arXiv 2105.14103, eq. 2."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# The implementation goes in blocks of at least 32.
CORE: dict[str, Any] = {"window": 32}
HARD: dict[str, Any] | None = {"window": 33, "rank": 5}
FURTHER: list[dict[str, Any]] = [
    {"window": 1, "rank": 5},
    {"window": 1000, "rank": 5},
]


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
    """Every output as a gated mean over the keys it sees, with e^(k + u·v) near and e^k far."""
    tables = dict(mechanism.named_parameters())
    length = q_BHLK.shape[2]
    u, v = (tables[f"biases.{name}"][:length].to(q_BHLK.dtype) for name in "uv")
    near = torch.ones(length, length, dtype=torch.bool)
    near = near.triu(1 - options["window"]) & near.tril(options["window"] - 1)
    bias = torch.einsum("ir,jr->ij", u, v) * near
    weights = (k_BHLK[:, :, None] + bias[..., None]).exp() * visible_B1LL[..., None]
    # A row that sees nothing is 0 / 1.
    totals = weights.sum(3) + ~visible_B1LL.any(3)[..., None]
    return torch.sigmoid(q_BHLK) * torch.einsum("bhijk,bhjk->bhik", weights, v_BHLC) / totals
