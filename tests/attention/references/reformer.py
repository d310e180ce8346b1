"""LSH attention: arXiv 2001.04451, section 2, with chunks counted within buckets."""

import torch
from torch import Tensor

from tests.attention.truth import NEVER, Given, logits


@logits(
    {"chunk": 8, "num_hashes": 1, "num_buckets": 6},
    {"chunk": 8, "num_hashes": 3, "num_buckets": 2, "redraw_every": 10},
    further=[{"chunk": 16, "num_hashes": 2, "num_buckets": 1}, {"chunk": 24}],
)
def reformer(given: Given) -> Tensor:
    """One softmax over the positions of all rounds, with unit keys, and self if alone."""
    q_BHLK, options = given.q_BHLK, given.options
    seen_BHLL = torch.zeros(*q_BHLK.shape[:3], given.length, dtype=torch.bool)
    # In float32 as in the mechanism: a tie would fall otherwise.
    rotations_THKR = given.tensors["rotations"].float()
    for rotations_HKR in rotations_THKR:
        rotated_BHLR = q_BHLK.detach().float() @ rotations_HKR
        buckets_BHL = torch.cat([rotated_BHLR, -rotated_BHLR], dim=-1).argmax(dim=-1)
        if options["num_buckets"] == 1:
            buckets_BHL = torch.zeros_like(buckets_BHL)
        seen_BHLL |= seen_in_a_round(buckets_BHL, given.mask_BL[:, None], options["chunk"])
    is_self_LL = torch.eye(given.length, dtype=torch.bool)
    seen_BHLL = seen_BHLL & given.visible() & ~is_self_LL
    seen_BHLL = seen_BHLL | (is_self_LL & ~seen_BHLL.any(dim=-1, keepdim=True))
    k_BHLK = q_BHLK / (q_BHLK.square().sum(dim=-1, keepdim=True) + 1e-12).sqrt()
    return (q_BHLK @ k_BHLK.mT).masked_fill(~seen_BHLL, NEVER)


def seen_in_a_round(buckets_BHL: Tensor, is_true_B1L: Tensor, size: int) -> Tensor:
    """Which j is, in the bucket of i, in the chunk of i or in the one before it: BHLL."""
    same_BHLL = (buckets_BHL[..., :, None] == buckets_BHL[..., None, :]) & is_true_B1L[..., None, :]
    chunk_BHL = same_BHLL.tril(-1).sum(dim=-1) // size
    behind_BHLL = chunk_BHL[..., :, None] - chunk_BHL[..., None, :]
    return same_BHLL & ((behind_BHLL == 0) | (behind_BHLL == 1))
