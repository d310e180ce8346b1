"""AFT-conv by convolutions and sums, as it is written in arXiv 2105.14103, "AFT-conv"."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CORE: dict[str, Any] = {}
HARD: dict[str, Any] | None = {"kernel_size": 75}
FURTHER: list[dict[str, Any]] = [
    {"kernel_size": 3},
]


def is_linear_in_values(options: Mapping[str, Any]) -> bool:
    """It is, but it has as many value channels as key channels: the identity does not fit."""
    return False


def rows_sum_to_one(options: Mapping[str, Any]) -> bool:
    """Always."""
    return True


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
    """σ(q) (conv(e^x v, e^w - 1) + Σ e^x v) / (conv(e^x, e^w - 1) + Σ e^x)."""
    mask_BL = visible_B1LL.any(2)[:, 0]
    is_causal = not visible_B1LL.triu(1).any()
    exponents = k_BHLK.sum(-1, keepdim=True) / math.sqrt(k_BHLK.shape[-1])
    weights = exponents.exp() * mask_BL[:, None, :, None]
    kernel = torch.expm1(_kernel(mechanism, q_BHLK.dtype))
    numerator, denominator = (
        _convolution(x, kernel, is_causal=is_causal)
        + (x.cumsum(2) if is_causal else x.sum(2, keepdim=True))
        for x in (weights * v_BHLC, weights)
    )
    # A causal row before the first residue has summed nothing: it is 0 / 1.
    quotient = numerator / (denominator + (denominator == 0))
    return torch.sigmoid(q_BHLK) * quotient * mask_BL[:, None, :, None]


def _kernel(mechanism: nn.Module, dtype: torch.dtype) -> Tensor:
    """w = γ (z - mean z) / std z + β of every head."""
    tables = {name: x.to(dtype) for name, x in mechanism.named_parameters()}
    kernel = tables["kernel"]
    centered = kernel - kernel.mean(1, keepdim=True)
    deviation = centered.square().mean(1, keepdim=True).sqrt()
    return tables["gain"][:, None] * centered / deviation + tables["shift"][:, None]


def _convolution(x: Tensor, kernel: Tensor, *, is_causal: bool) -> Tensor:
    """A depthwise convolution along positions, every head with its kernel."""
    batch, heads, length, width = x.shape
    rows = x.permute(0, 3, 1, 2).reshape(batch * width, heads, length)
    size = kernel.shape[1]
    padding = (size - 1, 0) if is_causal else (size // 2, size // 2)
    out = F.conv1d(F.pad(rows, padding), kernel[:, None], groups=heads)
    return out.reshape(batch, width, heads, length).permute(0, 2, 3, 1)
