"""The textbook FAVOR+ estimate in O(L²): arXiv 2009.14794, Lemma 1, with the mechanism's rows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

VARIANTS: list[dict[str, Any]] = [{}, {"num_features": 20}]
LINEAR_IN_VALUES = True
ROWS_SUM_TO_ONE = True


def _positive_features(x_BHLK: Tensor, projection_RK: Tensor) -> Tensor:
    scaled_BHLK = x_BHLK / x_BHLK.shape[-1] ** 0.25
    half_square_BHL1 = scaled_BHLK.square().sum(-1, keepdim=True) / 2
    logits_BHLR = torch.einsum("bhlk,rk->bhlr", scaled_BHLK, projection_RK)
    return (logits_BHLR - half_square_BHL1).exp() / len(projection_RK) ** 0.5


def output(
    mechanism: nn.Module,
    options: Mapping[str, Any],
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    *,
    hidden_BLD: Tensor,
    visible_B1LL: Tensor,
) -> Tensor:
    """Every output as a weighted mean over the keys it sees."""
    projection_RK = mechanism.get_buffer("projection").to(q_BHLK.dtype)
    phi_q_BHLR = _positive_features(q_BHLK, projection_RK)
    phi_k_BHLR = _positive_features(k_BHLK, projection_RK)
    weights_BHLL = torch.einsum("bhir,bhjr->bhij", phi_q_BHLR, phi_k_BHLR) * visible_B1LL
    totals_BHL1 = weights_BHLL.sum(-1, keepdim=True)
    # A row that sees nothing is 0 / 1.
    totals_BHL1 = totals_BHL1 + (totals_BHL1 == 0)
    return (weights_BHLL / totals_BHL1) @ v_BHLC
