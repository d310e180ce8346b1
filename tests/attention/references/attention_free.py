"""The attention-free transformers: arXiv 2105.14103."""

from torch import Tensor

from tests.attention.cases import Given, gated_mean, outputs


# It is linear, but has as many value channels as key channels: the identity does not fit.
@outputs(linear=lambda _: False)
def aft_simple(given: Given) -> Tensor:
    """AFT-simple: arXiv 2105.14103, "AFT-simple"."""
    return gated_mean(given, given.k_BHLK, 0.0)


@outputs(further=[{"rank": 1}], linear=lambda _: False)
def aft_full(given: Given) -> Tensor:
    """AFT-full, one weight for every pair and channel: arXiv 2105.14103, eq. 2."""
    u, v = (given.tensors[f"biases.{name}"][: given.length] for name in "uv")
    return gated_mean(given, given.k_BHLK, u @ v.mT)


@outputs(
    # The implementation goes in blocks of at least 32.
    {"window": 32},
    {"window": 33, "rank": 5},
    further=[{"window": 1, "rank": 5}, {"window": 1000, "rank": 5}],
    linear=lambda _: False,
)
def aft_local(given: Given) -> Tensor:
    """AFT-local, with u·v for near pairs and 0 for others: arXiv 2105.14103, "AFT-local"."""
    u, v = (given.tensors[f"biases.{name}"][: given.length] for name in "uv")
    is_near_LL = given.distances().abs() < given.options["window"]
    return gated_mean(given, given.k_BHLK, u @ v.mT * is_near_LL)


@outputs({}, {"kernel_size": 75}, further=[{"kernel_size": 3}], linear=lambda _: False)
def aft_conv(given: Given) -> Tensor:
    """AFT-conv, with one exponent for a head, and w = γ (z - mean z) / std z + β for a distance."""
    kernel, gain, shift = (given.tensors[name] for name in ("kernel", "gain", "shift"))
    kernel = (kernel - kernel.mean(1, keepdim=True)) / kernel.std(1, keepdim=True, correction=0)
    kernel = gain[:, None] * kernel + shift[:, None]
    size = kernel.shape[1]
    place_LL = (size - 1 if given.causal else size // 2) - given.distances()
    is_near_LL = (place_LL >= 0) & (place_LL < size)
    bias_HLL = kernel[:, place_LL.clamp(0, size - 1)] * is_near_LL
    exponents = given.k_BHLK.sum(-1, keepdim=True) / given.head_dim**0.5
    return gated_mean(given, exponents.expand_as(given.k_BHLK), bias_HLL)
