"""Random feature attention in O(L²): arXiv 2103.02143, sections 3.1 and 3.2."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CORE: dict[str, Any] = {"num_features": 20}
HARD: dict[str, Any] | None = {
    "num_features": 17,
    "kernel": "arccos",
    "gate": True,
    "denominator_floor": None,
}
FURTHER: list[dict[str, Any]] = [
    {"num_features": 7, "kernel": "arccos", "redraw_every": None},
    {"num_features": 20, "gate": True},
]


def is_linear_in_values(options: Mapping[str, Any]) -> bool:
    """Always."""
    return True


def rows_sum_to_one(options: Mapping[str, Any]) -> bool:
    """Only where nothing guards the sum of a row's weights."""
    return options["denominator_floor"] is None


def _kernel(x_BHLK: Tensor, y_BHLK: Tensor, rows_RK: Tensor, kernel: str) -> Tensor:
    """The mean over the rows of what each of them says of every pair, BHLL."""
    x_BHLR, y_BHLR = x_BHLK @ rows_RK.mT, y_BHLK @ rows_RK.mT
    pairs = x_BHLR[:, :, :, None], y_BHLR[:, :, None]
    if kernel == "gaussian":
        return (pairs[0] - pairs[1]).cos().mean(-1)
    return (pairs[0].clamp(min=0) * pairs[1].clamp(min=0)).mean(-1)


def _gates(parameters: Mapping[str, Tensor], hidden_BLD: Tensor, visible_B1LL: Tensor) -> Tensor:
    """The weight (1 - g_j) g_{j+1} … g_i of every pair over their sum for i, BHLL, step by step."""
    logits_BLH = hidden_BLD @ parameters["gate.weight"].mT + parameters["gate.bias"]
    gates_BHL = logits_BLH.sigmoid().mT
    visible_BLL = visible_B1LL[:, 0]
    is_real_BL = visible_BLL.diagonal(dim1=1, dim2=2)
    weights_BHL = torch.zeros_like(gates_BHL)
    rows = []
    for i in range(gates_BHL.shape[2]):
        gate_BH1 = gates_BHL[:, :, i, None]
        newest_L = torch.arange(gates_BHL.shape[2]) == i
        stepped_BHL = gate_BH1 * weights_BHL + (1 - gate_BH1) * newest_L
        weights_BHL = torch.where(is_real_BL[:, i, None, None], stepped_BHL, weights_BHL)
        total_BH1 = weights_BHL.sum(-1, keepdim=True)
        rows.append(weights_BHL / torch.where(total_BH1 == 0, 1, total_BH1))
    return torch.stack(rows, dim=2)


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
    """Every output as a weighted mean over the keys it sees, its divisor no less than the floor."""
    parameters = dict(mechanism.named_parameters())
    (rows_RK,) = (x for name, x in mechanism.named_buffers() if name.endswith("projection"))
    heads, width = q_BHLK.shape[1], q_BHLK.shape[3]
    scales_H1K = parameters["scales"].reshape(heads, 1, width // 2).repeat(1, 1, 2)
    unit = [x / (x.norm(dim=-1, keepdim=True) + 1e-3) for x in (q_BHLK, k_BHLK)]
    weights_BHLL = _kernel(
        unit[0] * scales_H1K, unit[1] * scales_H1K, rows_RK.to(q_BHLK.dtype), options["kernel"]
    )
    if options["gate"]:
        weights_BHLL = weights_BHLL * _gates(parameters, hidden_BLD, visible_B1LL)
    weights_BHLL = weights_BHLL * visible_B1LL
    totals_BHL1 = weights_BHLL.sum(-1, keepdim=True)
    if options["denominator_floor"] is not None:
        totals_BHL1 = totals_BHL1.clamp(min=options["denominator_floor"])
    return (weights_BHLL / (totals_BHL1 + (totals_BHL1 == 0))) @ v_BHLC
