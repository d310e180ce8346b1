"""LSH attention in O(L²): arXiv 2001.04451, section 2, with chunks counted within buckets."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CORE: dict[str, Any] = {"chunk": 8, "num_hashes": 1, "num_buckets": 6}
HARD: dict[str, Any] | None = {"chunk": 8, "num_hashes": 3, "num_buckets": 2, "redraw_every": 10}
FURTHER: list[dict[str, Any]] = [
    {"chunk": 16, "num_hashes": 2, "num_buckets": 1},
    {"chunk": 24},
]


def is_linear_in_values(options: Mapping[str, Any]) -> bool:
    """Always: hashes are those of the queries."""
    return True


def rows_sum_to_one(options: Mapping[str, Any]) -> bool:
    """Always."""
    return True


def _buckets(q_BHLK: Tensor, rotations_HKR: Tensor) -> Tensor:
    """h(x) = argmax [x R; -x R], in float32 as in the mechanism: a tie would fall otherwise."""
    rotated_BHLR = torch.einsum("bhlk,hkr->bhlr", q_BHLK.detach().float(), rotations_HKR.float())
    return torch.cat([rotated_BHLR, -rotated_BHLR], dim=-1).argmax(dim=-1)


def seen_in_a_round(buckets_BHL: Tensor, is_true_B1L: Tensor, size: int) -> Tensor:
    """Which j is, in the bucket of i, in the chunk of i or in the one before it: BHLL."""
    length = buckets_BHL.shape[-1]
    same_BHLL = (buckets_BHL[..., :, None] == buckets_BHL[..., None, :]) & is_true_B1L[..., None, :]
    earlier_LL = torch.ones(length, length, dtype=torch.bool).tril(-1)
    chunk_BHL = (same_BHLL & earlier_LL).sum(dim=-1) // size
    behind_BHLL = chunk_BHL[..., :, None] - chunk_BHL[..., None, :]
    return same_BHLL & ((behind_BHLL == 0) | (behind_BHLL == 1))


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
    """Computes one softmax over the positions of all rounds, with unit keys, and self if alone."""
    rotations_THKR = dict(mechanism.named_buffers())["rotations"]
    is_true_B1L = visible_B1LL.diagonal(dim1=-2, dim2=-1)
    seen_BHLL = torch.zeros(*q_BHLK.shape[:3], q_BHLK.shape[2], dtype=torch.bool)
    for rotations_HKR in rotations_THKR:
        buckets_BHL = _buckets(q_BHLK, rotations_HKR)
        if mechanism.num_buckets == 1:
            buckets_BHL = torch.zeros_like(buckets_BHL)
        seen_BHLL |= seen_in_a_round(buckets_BHL, is_true_B1L, options["chunk"])
    is_self_LL = torch.eye(q_BHLK.shape[2], dtype=torch.bool)
    seen_BHLL = seen_BHLL & visible_B1LL & ~is_self_LL
    seen_BHLL = seen_BHLL | (is_self_LL & visible_B1LL & ~seen_BHLL.any(dim=-1, keepdim=True))

    k_BHLK = q_BHLK / (q_BHLK.square().sum(dim=-1, keepdim=True) + 1e-12).sqrt()
    exponents_BHLL = torch.einsum("bhik,bhjk->bhij", q_BHLK, k_BHLK)
    exponents_BHLL = exponents_BHLL.masked_fill(~seen_BHLL, -torch.inf)
    # A row at padding sees nothing: it is 0 / 1.
    top_BHL1 = exponents_BHLL.detach().amax(dim=-1, keepdim=True).clamp_min(-1e300)
    weights_BHLL = (exponents_BHLL - top_BHL1).exp()
    totals_BHL1 = weights_BHLL.sum(dim=-1, keepdim=True)
    return (weights_BHLL / (totals_BHL1 + (totals_BHL1 == 0))) @ v_BHLC
