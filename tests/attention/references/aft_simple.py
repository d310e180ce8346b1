"""AFT-simple: arXiv 2105.14103, "AFT-simple"."""

from torch import Tensor

from tests.attention.truth import Given, gated_mean, outputs


# It is linear, but has as many value channels as key channels: the identity does not fit.
@outputs(linear=lambda _: False)
def aft_simple(given: Given) -> Tensor:
    return gated_mean(given, given.k_BHLK, 0.0)
