"""Hedgehog: arXiv 2402.04347, section 4.1, with a matrix W for each head."""

import torch
from torch import Tensor

from tests.attention.truth import Given, weights


@weights()
def hedgehog(given: Given) -> Tensor:
    """φ(q)·φ'(k), φ(x) = [exp(Wx), exp(-Wx)]."""
    learned_q = torch.einsum("hrk,bhlk->bhlr", given.tensors["query_map"], given.q_BHLK)
    learned_k = torch.einsum("hrk,bhlk->bhlr", given.tensors["key_map"], given.k_BHLK)
    phi_q, phi_k = (torch.cat([x, -x], dim=-1).exp() for x in (learned_q, learned_k))
    return phi_q @ phi_k.mT
