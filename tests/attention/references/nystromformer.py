"""Nyströmformer from its formula, sample by sample, without padding: arXiv 2102.03902."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CORE: dict[str, Any] = {"num_landmarks": 16, "conv_kernel": 5}
HARD: dict[str, Any] | None = {"num_landmarks": 7, "num_iterations": 2, "conv_kernel": 35}
FURTHER: list[dict[str, Any]] = [
    {"num_landmarks": 64, "num_iterations": 1, "conv_kernel": None},
    {"num_landmarks": 1, "num_iterations": 3, "conv_kernel": 1},
]


def is_linear_in_values(options: Mapping[str, Any]) -> bool:
    """Always."""
    return True


def rows_sum_to_one(options: Mapping[str, Any]) -> bool:
    """Never: the pseudo-inverse is not converged, and the skip adds to the weights."""
    return False


def _softmax(q: Tensor, k: Tensor) -> Tensor:
    exponents = torch.einsum("hik,hjk->hij", q, k) / math.sqrt(q.shape[-1])
    weights = (exponents - exponents.detach().amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def _landmarks(x_HLK: Tensor, number: int) -> Tensor:
    """Means of segments: position r of n in segment ⌊r m / n⌋; all positions where they are few."""
    length = x_HLK.shape[1]
    if length <= number:
        return x_HLK
    segments: list[list[Tensor]] = [[] for _ in range(number)]
    for position in range(length):
        segments[position * number // length].append(x_HLK[:, position])
    return torch.stack([torch.stack(segment).mean(0) for segment in segments], dim=1)


def _inverse(a: Tensor, num_iterations: int) -> Tensor:
    """The iteration of order 3, one matrix at a time."""
    # `amax` shares the gradient among columns of one sum, as those of equal segments are.
    norm_1 = a.abs().sum(dim=0).amax()
    norm_infinity = a.abs().sum(dim=1).amax()
    z = a.T / (norm_1 * norm_infinity)
    one = torch.eye(len(a), dtype=a.dtype)
    for _ in range(num_iterations):
        z = 1 / 4 * z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z)))
    return z


def _skip(v_HLC: Tensor, weight: Tensor) -> Tensor:
    """out_i = Σ_s weight_s v_(i + s - width // 2), with nothing beyond the ends."""
    length, width = v_HLC.shape[1], weight.shape[1]
    out = torch.zeros_like(v_HLC)
    for tap in range(width):
        shift = tap - width // 2
        first, last = max(0, -shift), min(length, length - shift)
        if first < last:
            moved = torch.zeros_like(v_HLC)
            moved[:, first:last] = v_HLC[:, first + shift : last + shift]
            out = out + weight[:, tap, None, None] * moved
    return out


def output(
    mechanism: nn.Module,
    options: Mapping[str, Any],
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    *,
    hidden_BLD: Tensor,
    visible_B1LL: Tensor,
    causal: bool,
) -> Tensor:
    """Attention among the true positions alone, put back in their places, and the skip."""
    number = options["num_landmarks"]
    samples = []
    for q, k, v, visible_1LL in zip(q_BHLK, k_BHLK, v_BHLC, visible_B1LL, strict=True):
        (there,) = visible_1LL[0].any(-1).nonzero(as_tuple=True)
        out = torch.zeros_like(v)
        if len(there) > 0:
            q_there, k_there, v_there = q[:, there], k[:, there], v[:, there]
            q_marks, k_marks = _landmarks(q_there, number), _landmarks(k_there, number)
            a = _softmax(q_marks, k_marks)
            z = torch.stack([_inverse(matrix, options["num_iterations"]) for matrix in a])
            weights = _softmax(q_there, k_marks) @ z @ _softmax(q_marks, k_there)
            out = out.index_copy(1, there, weights @ v_there)
        if options["conv_kernel"] is not None:
            kernel = dict(mechanism.named_parameters())["conv_weight"]
            skip = _skip(v * visible_1LL.any(-1)[..., None], kernel)
            out = out + skip * visible_1LL.any(-1)[..., None]
        samples.append(out)
    return torch.stack(samples)
