"""Linear attention: arXiv 2006.16236, equations 5 and 7."""

import torch
from torch import Tensor

from tests.attention.truth import Given, weights


@weights()
def linear(given: Given) -> Tensor:
    """φ(q)·φ(k), φ(x) = elu(x) + 1, with 0 where the branch that is not taken could overflow."""
    phi_q, phi_k = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in given[:2])
    return phi_q @ phi_k.mT
