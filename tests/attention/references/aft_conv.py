"""AFT-conv, with one exponent for a head and a weight for each distance: arXiv 2105.14103."""

from torch import Tensor

from tests.attention.truth import Given, gated_mean, outputs


@outputs({}, {"kernel_size": 75}, further=[{"kernel_size": 3}], linear=lambda _: False)
def aft_conv(given: Given) -> Tensor:
    """w = γ (z - mean z) / std z + β, of j = i + o - reach at place o, as in a convolution."""
    kernel, gain, shift = (given.tensors[name] for name in ("kernel", "gain", "shift"))
    kernel = (kernel - kernel.mean(1, keepdim=True)) / kernel.std(1, keepdim=True, correction=0)
    kernel = gain[:, None] * kernel + shift[:, None]
    size = kernel.shape[1]
    place_LL = (size - 1 if given.causal else size // 2) - given.distances()
    is_near_LL = (place_LL >= 0) & (place_LL < size)
    bias_HLL = kernel[:, place_LL.clamp(0, size - 1)] * is_near_LL
    exponents = given.k_BHLK.sum(-1, keepdim=True) / given.head_dim**0.5
    return gated_mean(given, exponents.expand_as(given.k_BHLK), bias_HLL)
