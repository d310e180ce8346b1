"""Long-short attention: one softmax over near positions and summaries (arXiv 2107.02192, 3)."""

import math

import torch
from torch import Tensor

from tests.attention.truth import Given, outputs, softmax


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
    """A column of P is a softmax over the true positions of a chunk, of x W_p."""
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
        p_BHSPL = softmax(scores.permute(0, 2, 3, 1)[:, :, None], inside_BLS.mT[:, None, :, None])
        for x_BHLK, summarized in ((given.k_BHLK, keys), (given.v_BHLC, values)):
            far_BHSPK = p_BHSPL @ x_BHLK[:, :, None]
            summarized.append(layer_norm(given, "far_norm", far_BHSPK.flatten(2, 3)))
        sees_far = sees_far & inside_BLS.any(1)[:, None] & given.mask_BL[..., None]
        visible.insert(0, sees_far.repeat_interleave(rank, dim=-1)[:, None])
    keys.append(layer_norm(given, "near_norm", given.k_BHLK))
    values.append(layer_norm(given, "near_norm", given.v_BHLC))
    logits = given.q_BHLK @ torch.cat(keys, dim=2).mT / given.head_dim**0.5
    return softmax(logits, torch.cat(visible, dim=-1)) @ torch.cat(values, dim=2)


def layer_norm(given: Given, name: str, x_BHLK: Tensor) -> Tensor:
    """Over heads and channels together; the identity where the mechanism has no such norm."""
    if f"{name}.weight" not in given.tensors:
        return x_BHLK
    x_BLE = x_BHLK.transpose(1, 2).flatten(2)
    centered = x_BLE - x_BLE.mean(dim=-1, keepdim=True)
    scaled = centered / (centered.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    scaled = scaled * given.tensors[f"{name}.weight"] + given.tensors[f"{name}.bias"]
    return scaled.unflatten(-1, (x_BHLK.shape[1], -1)).transpose(1, 2)
