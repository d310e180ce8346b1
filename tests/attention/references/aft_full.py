"""AFT-full, one weight for every pair and channel: arXiv 2105.14103, eq. 2."""

from torch import Tensor

from tests.attention.truth import Given, gated_mean, outputs


@outputs(further=[{"rank": 1}], linear=lambda _: False)
def aft_full(given: Given) -> Tensor:
    u, v = (given.tensors[f"biases.{name}"][: given.length] for name in "uv")
    return gated_mean(given, given.k_BHLK, u @ v.mT)
