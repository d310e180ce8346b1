"""Random feature attention: arXiv 2103.02143, sections 3.1 and 3.2."""

import torch
from torch import Tensor

from tests.attention.truth import Given, weights


@weights(
    {"num_features": 20},
    {"num_features": 17, "kernel": "arccos", "gate": True, "denominator_floor": None},
    further=[
        {"num_features": 20, "gate": True},
        # Some sums are at the floor.
        {"num_features": 20, "denominator_floor": 15.0, "redraw_every": None},
        {"num_features": 7, "kernel": "arccos", "denominator_floor": 5.0},
    ],
)
def rfa(given: Given) -> Tensor:
    """The mean over the rows of a function of the projections of scaled unit vectors."""
    rows_RK, pairs = given.tensors["performer.projection"], given.tensors["scales"]
    scales_H1K = pairs.unflatten(0, (given.q_BHLK.shape[1], 1, -1)).repeat(1, 1, 2)
    unit = (x / (x.norm(dim=-1, keepdim=True) + 1e-3) for x in (given.q_BHLK, given.k_BHLK))
    q_BHLR, k_BHLR = (x * scales_H1K @ rows_RK.mT for x in unit)
    means = 0
    for q_BHL, k_BHL in zip(q_BHLR.unbind(-1), k_BHLR.unbind(-1), strict=True):
        one, other = q_BHL[..., None], k_BHL[..., None, :]
        if given.options["kernel"] == "gaussian":
            means = means + (one - other).cos() / q_BHLR.shape[-1]
        else:
            means = means + one.clamp(min=0) * other.clamp(min=0) / q_BHLR.shape[-1]
    return means * _gates(given) if given.options["gate"] else means


def _gates(given: Given) -> Tensor:
    """The weight (1 - g_j) g_{j+1} … g_i of every pair over their sum for i, step by step."""
    weight, bias = given.tensors["gate.weight"], given.tensors["gate.bias"]
    gates_BHL = (given.hidden_BLD @ weight.mT + bias).sigmoid().mT
    weights_BHL = torch.zeros_like(gates_BHL)
    rows = []
    for i in range(given.length):
        gate_BH1 = gates_BHL[:, :, i, None]
        newest_L = torch.arange(given.length) == i
        stepped_BHL = gate_BH1 * weights_BHL + (1 - gate_BH1) * newest_L
        weights_BHL = torch.where(given.mask_BL[:, i, None, None], stepped_BHL, weights_BHL)
        total_BH1 = weights_BHL.sum(-1, keepdim=True)
        rows.append(weights_BHL / torch.where(total_BH1 == 0, 1, total_BH1))
    return torch.stack(rows, dim=2)
