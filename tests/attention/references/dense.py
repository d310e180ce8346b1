"""Softmax over all keys, mixtures of them, landmarks and summaries."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attention.cases import Given, logits, outputs, visible_softmax


@logits()
def softmax(given: Given) -> Tensor:
    """arXiv 1706.03762, eq. 1."""
    return given.logits()


@outputs(
    {"projected_length": 16, "sharing": "none"},
    {"projected_length": 70, "sharing": "layers"},
    further=[
        {"projected_length": 5, "sharing": "heads"},
        {"projected_length": 16, "sharing": "key_value"},
    ],
    # The columns of F have any sum.
    sums_to_one=lambda _: False,
)
def linformer(given: Given) -> Tensor:
    """arXiv 2006.04768, section 4: softmax(q (E k)ᵀ / √K) F v, where padding is 0."""
    e_HPL = given.tensors["key_projection"][..., : given.length]
    f_HPL = given.tensors.get("value_projection", given.tensors["key_projection"])
    weights = (given.q_BHLK @ (e_HPL @ given.k_BHLK).mT / given.head_dim**0.5).softmax(-1)
    return weights @ (f_HPL[..., : given.length] @ given.v_BHLC)


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
    """arXiv 2102.03902, section 3, sample by sample.

    Attention among the true positions alone, put back in their places, and the skip.
    """
    samples = []
    for mask_L, *tensors in zip(given.mask_BL, *given[:3], strict=True):
        q, k, v = (x[:, mask_L] for x in tensors)
        out = torch.zeros_like(tensors[2])
        if mask_L.any():
            q_marks, k_marks = (landmarks(x, given.options["num_landmarks"]) for x in (q, k))
            matrices = attend(q_marks, k_marks)
            z = torch.stack([inverse(a, given.options["num_iterations"]) for a in matrices])
            rows = attend(q, k_marks) @ z @ (attend(q_marks, k) @ v)
            out = out.index_copy(1, mask_L.nonzero().flatten(), rows)
        samples.append(out)
    if given.options["conv_kernel"] is None:
        return torch.stack(samples)
    weight = given.tensors["conv_weight"]
    padding = (weight.shape[1] // 2, 0)
    skip = F.conv2d(given.v_BHLC, weight[:, None, :, None], padding=padding, groups=len(weight))
    return torch.stack(samples) + skip


def attend(q: Tensor, k: Tensor) -> Tensor:
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


@outputs(
    # Several chunks in a block of queries, and a history of several blocks.
    {"window": 16, "rank": 3, "chunk": 8, "memory": 150},
    # Nothing divides anything, and the map is linear in the values.
    {"window": 7, "rank": 2, "chunk": 30, "memory": 40, "dual_norm": False},
    further=[
        # All of the history.
        {"window": 7, "rank": 2, "chunk": 30, "memory": None},
        {"window": 16, "rank": 0, "chunk": 8},
        {"window": 100, "rank": 4, "chunk": 12, "memory": 20, "dual_norm": False},
    ],
    linear=lambda options: not options["dual_norm"],
)
def long_short(given: Given) -> Tensor:
    """arXiv 2107.02192, section 3: one softmax over near positions and summaries.

    A column of P is a softmax over the true positions of a chunk, of x W_p.
    """
    options, position_L = given.options, torch.arange(given.length)
    window, rank, half = options["window"], options["rank"], options["window"] // 2
    chunk = options["chunk"] if given.causal else given.length
    chunk_L, number_S = position_L // chunk, torch.arange(math.ceil(given.length / chunk))
    start_L1 = (position_L // window * window - half)[:, None]
    sees_near = (start_L1 <= position_L) & (position_L < start_L1 + 2 * window)
    sees_far = torch.ones(given.length, len(number_S), dtype=torch.bool)
    if given.causal:
        sees_near = given.distances() < window
        behind_LS = chunk_L[:, None] - number_S
        memory = given.length if options["memory"] is None else options["memory"]
        sees_far = (behind_LS > 0) & (behind_LS <= math.ceil(memory / chunk))
    inside_BLS = given.mask_BL[..., None] & (chunk_L[:, None] == number_S)
    keys, values, visible = [], [], [given.visible() & sees_near]
    if rank:
        scores = (given.hidden_BLD @ given.tensors["projection"]).unflatten(-1, (-1, rank))
        p_BHSPL = visible_softmax(
            scores.permute(0, 2, 3, 1)[:, :, None], inside_BLS.mT[:, None, :, None]
        )
        for x_BHLK, summarized in ((given.k_BHLK, keys), (given.v_BHLC, values)):
            far_BHSPK = p_BHSPL @ x_BHLK[:, :, None]
            summarized.append(layer_norm(given, "far_norm", far_BHSPK.flatten(2, 3)))
        sees_far = sees_far & inside_BLS.any(1)[:, None] & given.mask_BL[..., None]
        visible.insert(0, sees_far.repeat_interleave(rank, dim=-1)[:, None])
    keys.append(layer_norm(given, "near_norm", given.k_BHLK))
    values.append(layer_norm(given, "near_norm", given.v_BHLC))
    logits = given.q_BHLK @ torch.cat(keys, dim=2).mT / given.head_dim**0.5
    return visible_softmax(logits, torch.cat(visible, dim=-1)) @ torch.cat(values, dim=2)


def layer_norm(given: Given, name: str, x_BHLK: Tensor) -> Tensor:
    """Over heads and channels together; the identity where the mechanism has no such norm."""
    if f"{name}.weight" not in given.tensors:
        return x_BHLK
    x_BLE = x_BHLK.transpose(1, 2).flatten(2)
    centered = x_BLE - x_BLE.mean(dim=-1, keepdim=True)
    scaled = centered / (centered.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    scaled = scaled * given.tensors[f"{name}.weight"] + given.tensors[f"{name}.bias"]
    return scaled.unflatten(-1, (x_BHLK.shape[1], -1)).transpose(1, 2)
