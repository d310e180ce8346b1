"""AFT-local, with u·v for near pairs and 0 for others: arXiv 2105.14103, "AFT-local"."""

from torch import Tensor

from tests.attention.truth import Given, gated_mean, outputs


@outputs(
    # The implementation goes in blocks of at least 32.
    {"window": 32},
    {"window": 33, "rank": 5},
    further=[{"window": 1, "rank": 5}, {"window": 1000, "rank": 5}],
    linear=lambda _: False,
)
def aft_local(given: Given) -> Tensor:
    u, v = (given.tensors[f"biases.{name}"][: given.length] for name in "uv")
    is_near_LL = given.distances().abs() < given.options["window"]
    return gated_mean(given, given.k_BHLK, u @ v.mT * is_near_LL)
