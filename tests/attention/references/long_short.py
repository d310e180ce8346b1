"""Long-short attention from its formula, one query after the other: arXiv 2107.02192, section 3."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Several chunks in a block of queries, and a history of several blocks.
CORE: dict[str, Any] = {"window": 16, "rank": 3, "chunk": 8, "memory": 150}
# Nothing divides anything, and the map is linear in the values.
HARD: dict[str, Any] | None = {
    "window": 7,
    "rank": 2,
    "chunk": 30,
    "memory": 40,
    "dual_norm": False,
}
FURTHER: list[dict[str, Any]] = [
    # All of the history.
    {"window": 7, "rank": 2, "chunk": 30, "memory": None},
    {"window": 16, "rank": 0, "chunk": 8},
    {"window": 100, "rank": 4, "chunk": 12, "memory": 20, "dual_norm": False},
]


def is_linear_in_values(options: Mapping[str, Any]) -> bool:
    """Without the LayerNorms."""
    return not options["dual_norm"]


def rows_sum_to_one(options: Mapping[str, Any]) -> bool:
    """Always: a column of P sums to 1, and so does the softmax over summaries and positions."""
    return True


def _layer_norm(x_LHK: Tensor, mechanism: nn.Module, name: str) -> Tensor:
    """Over heads and channels together; the identity where the mechanism has no such norm."""
    parameters = dict(mechanism.named_parameters())
    if f"{name}.weight" not in parameters:
        return x_LHK
    flat = x_LHK.flatten(1)
    centered = flat - flat.mean(dim=1, keepdim=True)
    scaled = centered / (centered.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
    scaled = scaled * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]
    return scaled.view_as(x_LHK)


def _compressed(
    x_LHK: Tensor, scores_LHP: Tensor, true_L: Tensor, chunk: int
) -> list[tuple[int, Tensor]]:
    """Number and Pᵀ x, PHK, of every chunk that has a true position."""
    found = []
    for number, start in enumerate(range(0, len(x_LHK), chunk)):
        inside = torch.arange(start, min(start + chunk, len(x_LHK)))
        inside = inside[true_L[inside]]
        if len(inside):
            weights = scores_LHP[inside].softmax(dim=0)
            found.append((number, torch.einsum("lhp,lhk->phk", weights, x_LHK[inside])))
    return found


def _sees(query: int, options: Mapping[str, Any], length: int, *, causal: bool) -> list[int]:
    """The positions near a query."""
    window = options["window"]
    if causal:
        return list(range(max(query - window + 1, 0), query + 1))
    start = (query // window) * window
    first, last = start - window // 2, start + window + (window + 1) // 2
    return list(range(max(first, 0), min(last, length)))


def _sees_chunk(query: int, number: int, options: Mapping[str, Any], *, causal: bool) -> bool:
    if not causal:
        return True
    chunk, memory = options["chunk"], options["memory"]
    own = query // chunk
    return number < own and (memory is None or number >= own - math.ceil(memory / chunk))


def _sample(
    mechanism: nn.Module,
    options: Mapping[str, Any],
    tensors_LHK: tuple[Tensor, Tensor, Tensor],
    hidden_LD: Tensor,
    true_L: Tensor,
    *,
    causal: bool,
) -> Tensor:
    """The output of one sample, LHK."""
    q_LHK, k_LHK, v_LHK = tensors_LHK
    length, heads, width = q_LHK.shape
    near_k, near_v = (_layer_norm(x, mechanism, "near_norm") for x in (k_LHK, v_LHK))
    far_k, far_v = [], []
    if options["rank"]:
        projection = dict(mechanism.named_parameters())["projection"]
        scores_LHP = (hidden_LD @ projection).reshape(length, heads, options["rank"])
        chunk = options["chunk"] if causal else length
        for x_LHK, found in ((k_LHK, far_k), (v_LHK, far_v)):
            for number, summary in _compressed(x_LHK, scores_LHP, true_L, chunk):
                found.append((number, _layer_norm(summary, mechanism, "far_norm")))
    rows = []
    for i in range(length):
        near = [j for j in _sees(i, options, length, causal=causal) if true_L[j]]
        if not true_L[i]:
            rows.append(0 * v_LHK[i])
            continue
        keys, values = (
            torch.cat([x[near]] + [y for n, y in far if _sees_chunk(i, n, options, causal=causal)])
            for x, far in ((near_k, far_k), (near_v, far_v))
        )
        weights = (torch.einsum("hk,jhk->jh", q_LHK[i], keys) / math.sqrt(width)).softmax(dim=0)
        rows.append(torch.einsum("jh,jhk->hk", weights, values))
    return torch.stack(rows)


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
    """Every query with its own list of keys: those near it, and summaries of chunks."""
    samples = [
        _sample(
            mechanism,
            options,
            (q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)),
            hidden_LD,
            visible_LL.diagonal(),
            causal=causal,
        )
        for q, k, v, hidden_LD, (visible_LL,) in zip(
            q_BHLK, k_BHLK, v_BHLC, hidden_BLD, visible_B1LL, strict=True
        )
    ]
    return torch.stack(samples).transpose(1, 2)
