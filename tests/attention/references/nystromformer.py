"""Nyströmformer, sample by sample, without padding: arXiv 2102.03902, section 3."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attention.truth import Given, outputs


@outputs(
    {"num_landmarks": 16, "conv_kernel": 5},
    {"num_landmarks": 7, "num_iterations": 2, "conv_kernel": 35},
    further=[
        {"num_landmarks": 64, "num_iterations": 1, "conv_kernel": None},
        {"num_landmarks": 1, "num_iterations": 3, "conv_kernel": 1},
    ],
    # The pseudo-inverse is not converged, and the skip adds to the weights.
    sums_to_one=lambda _: False,
)
def nystromformer(given: Given) -> Tensor:
    """Attention among the true positions alone, put back in their places, and the skip."""
    samples = []
    for mask_L, *tensors in zip(given.mask_BL, *given[:3], strict=True):
        q, k, v = (x[:, mask_L] for x in tensors)
        out = torch.zeros_like(tensors[2])
        if mask_L.any():
            q_marks, k_marks = (landmarks(x, given.options["num_landmarks"]) for x in (q, k))
            matrices = softmax(q_marks, k_marks)
            z = torch.stack([inverse(a, given.options["num_iterations"]) for a in matrices])
            rows = softmax(q, k_marks) @ z @ (softmax(q_marks, k) @ v)
            out = out.index_copy(1, mask_L.nonzero().flatten(), rows)
        samples.append(out)
    if given.options["conv_kernel"] is None:
        return torch.stack(samples)
    weight = given.tensors["conv_weight"]
    padding = (weight.shape[1] // 2, 0)
    skip = F.conv2d(given.v_BHLC, weight[:, None, :, None], padding=padding, groups=len(weight))
    return torch.stack(samples) + skip


def softmax(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


def landmarks(x_HLK: Tensor, number: int) -> Tensor:
    """Means of segments: position r of n in segment ⌊r P / n⌋; all positions where they are few."""
    length = x_HLK.shape[1]
    if length <= number:
        return x_HLK
    segment_L = torch.arange(length) * number // length
    return torch.stack([x_HLK[:, segment_L == p].mean(1) for p in range(number)], dim=1)


def inverse(a: Tensor, num_iterations: int) -> Tensor:
    """The iteration of order 3, one matrix at a time."""
    # `amax` shares the gradient among columns of one sum, as those of equal segments are.
    z = a.T / (a.abs().sum(dim=0).amax() * a.abs().sum(dim=1).amax())
    one = torch.eye(len(a), dtype=a.dtype)
    for _ in range(num_iterations):
        z = 1 / 4 * z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z)))
    return z
