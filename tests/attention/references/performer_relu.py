"""The ReLU kernel: arXiv 2009.14794, A.4, with or without a projection."""

import torch
from torch import Tensor

from tests.attention.truth import Given, weights


@weights(
    {},
    {"num_features": 20, "kernel_epsilon": 0.25, "redraw_every": 10},
    further=[{"num_features": 20}],
)
def performer_relu(given: Given) -> Tensor:
    """φ(q)·φ(k), φ(x) = relu(ω·x) + ε."""
    rows_RK = given.tensors.get("projection", torch.eye(given.head_dim).double())
    phi_q, phi_k = (
        torch.where(x > 0, x, 0) + given.options["kernel_epsilon"]
        for x in (given.q_BHLK @ rows_RK.mT, given.k_BHLK @ rows_RK.mT)
    )
    return phi_q @ phi_k.mT
