"""Hybrid heads in O(L²): softmax of a band in the first heads, a kernel in the others."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

CORE: dict[str, Any] = {"window": 16}
HARD: dict[str, Any] | None = {
    "window": 150,
    "options": {"num_features": 20, "kernel_epsilon": 0.25, "redraw_every": 10},
}
FURTHER: list[dict[str, Any]] = [
    {
        "window": 16,
        "mechanism": "performer_generalized",
        "options": {"kernel": "elu", "kernel_epsilon": 0.0, "num_features": None},
    },
]


def is_linear_in_values(options: Mapping[str, Any]) -> bool:
    """These are."""
    return True


def rows_sum_to_one(options: Mapping[str, Any]) -> bool:
    """These do."""
    return True


def _feature_map(mechanism: nn.Module, options: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """φ(x) = relu(ω·x) + ε, or elu(x) + 1."""
    if options["mechanism"] == "performer_generalized":
        return lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    epsilon = options["options"].get("kernel_epsilon", 1e-3)
    projections = [x for name, x in mechanism.named_buffers() if name.endswith("projection")]
    if not projections:
        return lambda x: torch.where(x > 0, x, 0) + epsilon
    return lambda x: (x @ projections[0].to(x.dtype).mT).clamp(min=0) + epsilon


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
    """Every output as a weighted mean over the keys it sees, the weights of two kinds."""
    length, local = q_BHLK.shape[2], options["local_heads"]
    is_causal = length > 1 and not visible_B1LL.triu(1).any()
    position_L = torch.arange(length)
    distance_LL = position_L[:, None] - position_L
    reach = options["window"] if is_causal else options["window"] // 2
    near = q_BHLK[:, :local] @ k_BHLK[:, :local].mT / math.sqrt(q_BHLK.shape[-1])
    near = (near - near.detach().amax(-1, keepdim=True)).exp() * (distance_LL.abs() <= reach)
    phi = _feature_map(mechanism, options)
    far = phi(q_BHLK[:, local:]) @ phi(k_BHLK[:, local:]).mT
    weights_BHLL = torch.cat([near, far], dim=1) * visible_B1LL
    totals_BHL1 = weights_BHLL.sum(-1, keepdim=True)
    # A row that sees nothing is 0 / 1.
    return weights_BHLL @ v_BHLC / (totals_BHL1 + (totals_BHL1 == 0))
