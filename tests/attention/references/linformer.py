"""Linformer from its formula, one sample and one head after the other: arXiv 2006.04768."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CORE: dict[str, Any] = {"projected_length": 16, "sharing": "none"}
HARD: dict[str, Any] | None = {"projected_length": 70, "sharing": "layers"}
FURTHER: list[dict[str, Any]] = [
    {"projected_length": 5, "sharing": "heads"},
    {"projected_length": 16, "sharing": "key_value"},
]


def is_linear_in_values(options: Mapping[str, Any]) -> bool:
    """Always."""
    return True


def rows_sum_to_one(options: Mapping[str, Any]) -> bool:
    """Never: the columns of F have any sum."""
    return False


def _matrices(mechanism: nn.Module, sharing: str, head: int) -> tuple[Tensor, Tensor]:
    """E and F of a head."""
    parameters = dict(mechanism.named_parameters())
    names = {"none": 2, "heads": 2, "key_value": 1, "layers": 1}
    assert len(parameters) == names[sharing]
    own = head if sharing == "none" else 0
    e = parameters["key_projection"][own]
    f = e if names[sharing] == 1 else parameters["value_projection"][own]
    return e, f


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
    """softmax(q (E k)ᵀ / √K) F v over the positions that are there; padding has no columns."""
    samples = []
    for q_HLK, k_HLK, v_HLC, visible_1LL in zip(q_BHLK, k_BHLK, v_BHLC, visible_B1LL, strict=True):
        (there,) = visible_1LL[0].any(-1).nonzero(as_tuple=True)
        heads = []
        for head, (q, k, v) in enumerate(zip(q_HLK, k_HLK, v_HLC, strict=True)):
            e, f = _matrices(mechanism, options["sharing"], head)
            exponents = q[there] @ (e[:, there] @ k[there]).T / math.sqrt(q.shape[-1])
            weights = (exponents - exponents.detach().amax(-1, keepdim=True)).exp()
            weights = weights / weights.sum(-1, keepdim=True)
            out = weights @ (f[:, there] @ v[there])
            heads.append(torch.zeros_like(v).index_copy(0, there, out))
        samples.append(torch.stack(heads))
    return torch.stack(samples)
