"""Longformer in O(L²), position by position: arXiv 2004.05150, section 3."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CORE: dict[str, Any] = {"window": 16, "num_global": 0}
# Residues in the window of the first tokens and far from it, one beyond many samples.
HARD: dict[str, Any] | None = {
    "window": 10,
    "dilation": 3,
    "dilated_heads": 1,
    "num_global": 2,
    "global_positions": [40, 3, 71],
}
FURTHER: list[dict[str, Any]] = [
    {"window": 16, "num_global": 3},
    {"window": 150, "num_global": 2},
]


def is_linear_in_values(options: Mapping[str, Any]) -> bool:
    """Not with global tokens: their rows have their own values, from the hidden input."""
    return options["num_global"] == 0 and not options["global_positions"]


def rows_sum_to_one(options: Mapping[str, Any]) -> bool:
    """Always."""
    return True


def _global_tokens(visible_LL: Tensor, options: Mapping[str, Any]) -> list[int]:
    """The first positions that see themselves (padding does not), and residues; `<cls>` is 0."""
    true = [i for i in range(len(visible_LL)) if visible_LL[i, i]]
    residues = options["global_positions"]
    return [i for n, i in enumerate(true) if n < options["num_global"] or n in residues]


def _sees(visible_LL: Tensor, options: Mapping[str, Any], head: int, *, causal: bool) -> Tensor:
    """One head's pairs (i, j) with j in the window of i, or one of them global."""
    length = len(visible_LL)
    step = options["dilation"] if head < options["dilated_heads"] else 1
    window = options["window"]
    offsets = range(-window, 1) if causal else range(-(window // 2), window // 2 + 1)
    pairs = torch.zeros(length, length, dtype=torch.bool)
    for offset in offsets:
        # Entries (i, i + step · offset).
        if abs(step * offset) < length:
            pairs.diagonal(step * offset).fill_(True)
    for g in _global_tokens(visible_LL, options):
        pairs[g, :] = pairs[:, g] = True
    return pairs & visible_LL


def _attend(q_LK: Tensor, k_LK: Tensor, v_LC: Tensor, sees_LL: Tensor) -> Tensor:
    exponents_LL = torch.einsum("ik,jk->ij", q_LK, k_LK) / math.sqrt(q_LK.shape[-1])
    exponents_LL = exponents_LL - exponents_LL.detach().amax(-1, keepdim=True)
    weights_LL = exponents_LL.exp() * sees_LL
    totals_L1 = weights_LL.sum(-1, keepdim=True)
    # A row that sees nothing is 0 / 1.
    return weights_LL @ v_LC / (totals_L1 + (totals_L1 == 0))


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
    """The rows of a sample's head twice: by its window, and by the projections of global tokens."""
    batch, heads, length, width = q_BHLK.shape
    is_causal = length > 1 and not visible_B1LL.triu(1).any()
    weights = dict(mechanism.named_parameters())
    samples = []
    for b in range(batch):
        rows = []
        for h in range(heads):
            sees_LL = _sees(visible_B1LL[b, 0], options, h, causal=is_causal)
            q, k, v = q_BHLK[b, h], k_BHLK[b, h], v_BHLC[b, h]
            out_LC = _attend(q, k, v, sees_LL)
            if weights:
                own_q, own_k, own_v = (
                    x + hidden_BLD[b] @ weights[name][:, h * width : (h + 1) * width]
                    for name, x in (("query_global", q), ("key_global", k), ("value_global", v))
                )
                is_global_L1 = torch.zeros(length, 1, dtype=torch.bool)
                is_global_L1[_global_tokens(visible_B1LL[b, 0], options)] = True
                out_LC = torch.where(is_global_L1, _attend(own_q, own_k, own_v, sees_LL), out_LC)
            rows.append(out_LC)
        samples.append(torch.stack(rows))
    return torch.stack(samples)
