"""Weights φ(q)·φ(k): linear attention, the Performers, Hedgehog and RFA."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.attention.cases import Given, weights


def decays(given: Given) -> Tensor:
    """The products of the gates of true positions over (j, i] for j ≤ i, and over [i, j) for j > i.

    arXiv 2502.16249: λ_i = σ(w·h_i + b), or σ(b) for all, and S_i = λ_i S_{i-1} + φ(k_i) v_iᵀ in
    either direction: a query multiplies all earlier states by its gate, and a key none by its own.
    """
    if given.options["decay"] == "none":
        return torch.ones(())
    logits_BLH = given.tensors["gate.bias"].expand(*given.mask_BL.shape, -1)
    if given.options["decay"] == "selective":
        logits_BLH = logits_BLH + given.hidden_BLD @ given.tensors["gate.weight"].mT
    gates_BHL = torch.where(given.mask_BL[..., None], logits_BLH.sigmoid(), 1).mT
    rows = []
    for i in range(given.length):
        # From the query outward, the gates that each step passes.
        after = gates_BHL[..., i:].cumprod(-1)[..., :-1]
        before = gates_BHL[..., : i + 1].flip(-1).cumprod(-1)[..., :-1].flip(-1)
        rows.append(torch.cat([before, torch.ones_like(gates_BHL[..., :1]), after], dim=-1))
    return torch.stack(rows, dim=2)


@weights()
def linear(given: Given) -> Tensor:
    """arXiv 2006.16236, eqs. 5 and 7: φ(x) = elu(x) + 1, without overflow in the other branch."""
    phi_q, phi_k = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in given[:2])
    return phi_q @ phi_k.mT


@weights()
def hedgehog(given: Given) -> Tensor:
    """arXiv 2402.04347, section 4.1: φ(x) = [exp(Wx), exp(-Wx)]."""
    learned_q = torch.einsum("hrk,bhlk->bhlr", given.tensors["query_map"], given.q_BHLK)
    learned_k = torch.einsum("hrk,bhlk->bhlr", given.tensors["key_map"], given.k_BHLK)
    phi_q, phi_k = (torch.cat([x, -x], dim=-1).exp() for x in (learned_q, learned_k))
    return phi_q @ phi_k.mT


@weights(
    {},
    {"num_features": 20, "kernel_epsilon": 0.25, "redraw_every": 10},
    {"decay": "learned"},
    {"decay": "selective"},
    further=[{"num_features": 20}, {"num_features": 20, "decay": "selective"}],
)
def performer_relu(given: Given) -> Tensor:
    """arXiv 2009.14794, A.4: φ(x) = relu(ω·x) + ε, with or without a projection."""
    rows_RK = given.tensors.get("projection", torch.eye(given.head_dim).double())
    phi_q, phi_k = (
        torch.where(x > 0, x, 0) + given.options["kernel_epsilon"]
        for x in (given.q_BHLK @ rows_RK.mT, given.k_BHLK @ rows_RK.mT)
    )
    return phi_q @ phi_k.mT * decays(given)


# As functions of a number; the derivatives are autograd's.
KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: torch.where(x > 0, x, 0),
    "elu": lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
    "exp": lambda x: math.e**x,
    "abs": lambda x: torch.where(x > 0, x, -x),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "tanh": lambda x: 1 - 2 / ((2 * x).exp() + 1),
    "cos": lambda x: (x + math.pi / 2).sin(),
    "square_relu": lambda x: torch.where(x > 0, x * x, 0),
    "identity": lambda x: x,
}


@weights(
    {},
    {"num_features": 20, "kernel": "exp", "row_norms": "sqrt_dim", "antithetic": True},
    further=[
        {"num_features": None},
        {"num_features": 20, "kernel": "elu", "projection": "iid"},
        {"num_features": None, "kernel": "exp"},
        {"num_features": 20, "kernel": "abs", "projection": "iid"},
        {"num_features": 20, "kernel": "sigmoid"},
        {"num_features": None, "kernel": "square_relu", "kernel_epsilon": 0.25},
        {"num_features": 20, "kernel": "gelu", "denominator_floor": 2.0},
        {"num_features": None, "kernel": "tanh", "denominator_floor": 2.0},
        {"num_features": 20, "kernel": "cos", "denominator_floor": 30.0},
        {"num_features": 20, "kernel": "identity", "denominator_floor": 60.0},
        {"num_features": None, "kernel": "tanh", "denominator_floor": 2.0, "decay": "learned"},
        {"num_features": 20, "kernel": "cos", "denominator_floor": 30.0, "decay": "selective"},
    ],
)
def performer_generalized(given: Given) -> Tensor:
    """arXiv 2009.14794, A.4 and D.3: φ(x) = f(ω·x) + ε, with or without a projection."""
    rows_RK = given.tensors.get("projection", torch.eye(given.head_dim).double())
    f, epsilon = KERNELS[given.options["kernel"]], given.options["kernel_epsilon"]
    phi_q, phi_k = (f(x @ rows_RK.mT) + epsilon for x in (given.q_BHLK, given.k_BHLK))
    return phi_q @ phi_k.mT * decays(given)


SINES = {"estimator": "trigonometric"}


@weights(
    {},
    {"num_features": 20, "optimal_for": 4.0, "antithetic": True, "projection": "iid"},
    {"num_features": 20, "decay": "selective"},
    further=[
        {"num_features": 20, "decay": "learned"},
        {"num_features": 20},
        {"num_features": 20, "estimator": "hyperbolic", "projection": "iid"},
        {"num_features": 20, "estimator": "regularized"},
        {"num_features": 40, **SINES, "denominator_floor": 20.0},
        {"num_features": 40, **SINES, "denominator_floor": 20.0, "decay": "selective"},
    ],
)
def performer_softmax(given: Given) -> Tensor:
    """arXiv 2009.14794, Lemma 1, with the mechanism's rows, or 2205.15317's features with their A.

    Trigonometric weights are cosines of the difference, without the factor of the query.
    """
    rows_RK, width = given.tensors["projection"], given.head_dim
    q_BHLK, k_BHLK = (x * width**-0.25 for x in (given.q_BHLK, given.k_BHLK))
    q_BHLR, k_BHLR = q_BHLK @ rows_RK.mT, k_BHLK @ rows_RK.mT
    half_q, half_k = (x.square().sum(-1, keepdim=True) / 2 for x in (q_BHLK, k_BHLK))
    if given.options["estimator"] == "trigonometric":
        cosines = q_BHLR.sin() @ k_BHLR.sin().mT + q_BHLR.cos() @ k_BHLR.cos().mT
        return cosines * half_k.exp().mT / len(rows_RK) * decays(given)
    stretch, exponent, norm = 1.0, 0.0, given.options["optimal_for"]
    if norm is not None:
        rho = math.sqrt((2 * norm + width) ** 2 + 8 * width * norm) - 2 * norm - width
        exponent = (1 - 4 * norm / rho) / 8
        stretch = math.sqrt(1 - 4 * exponent)
    of_rows_R = exponent * rows_RK.square().sum(-1)
    phi_q = (stretch * q_BHLR - half_q + of_rows_R).exp()
    phi_k = (stretch * k_BHLR - half_k + of_rows_R).exp()
    return stretch**width * phi_q @ phi_k.mT / len(rows_RK) * decays(given)


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
    """arXiv 2103.02143, 3.1 and 3.2: a mean over the rows of functions of scaled unit vectors."""
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
