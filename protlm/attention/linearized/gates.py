"""Gates of linear attention: one number for each position and head, in log space."""

import math
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.attention.ops.numerics import (
    in_float64,
    no_autocast,
    upcast,
    widest_dtype,
    zero_padding,
)

# Gates closer to 0 or 1 than 3e-7 are not distinguished.
_LARGEST_LOGIT = 15.0


class Decay(StrEnum):
    """What the weights of distant pairs decay by."""

    # Weights do not depend on the distance.
    none = "none"
    # One learned factor for each head and position between a query and a key.
    learned = "learned"
    # Factors that depend on the input of the block.
    selective = "selective"


class Gate(nn.Module):
    """The logits w·h + b of one gate per head, clamped to ±15; b without a `model_dim`.

    Args:
        memory_H: initial 1 / (1 - g), in positions, where w·h is 0.
        model_dim: width D of h; w ~ N(0, 0.02²) initially.
    """

    def __init__(self, memory_H: Tensor, *, model_dim: int | None) -> None:
        super().__init__()
        self.weight = None
        if model_dim is not None:
            self.weight = nn.Parameter(0.02 * torch.randn(len(memory_H), model_dim))
        self.bias = nn.Parameter((memory_H - 1).log())

    @classmethod
    def of(cls, decay: str, *, num_heads: int, model_dim: int) -> "Gate | None":
        """Creates the gate of a decay: memories of 512 to 32 positions, in equal ratios.

        These are RetNet's fifth and first head, 1 - g = 2^-9 and 2^-5 (arXiv 2307.08621).
        """
        if decay == Decay.none:
            return None
        memory_H = torch.logspace(9, 5, num_heads, base=2.0)
        return cls(memory_H, model_dim=model_dim if decay == Decay.selective else None)

    def forward(self, hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Returns the logits, BHL1, in float32 (float64 for float64); b at padding."""
        hidden_BLD = upcast(hidden_BLD.masked_fill(~mask_BL[..., None], 0))
        bias_H = self.bias.to(hidden_BLD.dtype)
        if self.weight is None:
            logits_BLH = bias_H.expand(*mask_BL.shape, -1)
        else:
            with no_autocast(hidden_BLD):
                logits_BLH = F.linear(hidden_BLD, self.weight.to(hidden_BLD.dtype), bias_H)
        return logits_BLH.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT).mT[..., None]

    def logs(self, hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Returns ln g, BHL1; 0 at padding, which is not a distance."""
        return zero_padding(F.logsigmoid(self(hidden_BLD, mask_BL)), mask_BL)


def decays(log_gate_BHL1: Tensor, rows: slice) -> Tensor:
    """Returns the decay of each pair of a position in `rows` and one of all, BHML."""
    # In float64, because differences of long sums are small.
    exact_BHL1, device = in_float64(log_gate_BHL1), log_gate_BHL1.device
    until_BHL1 = exact_BHL1.cumsum(dim=2)
    before_BHL1 = until_BHL1 - exact_BHL1
    sums_BHML = pairs(until_BHL1[:, :, rows], before_BHL1[:, :, rows], until_BHL1, before_BHL1)
    return sums_BHML.exp().to(widest_dtype(device)).to(device)


def decay_(sums: Tensor, log_gate: Tensor) -> None:
    """Multiplies sums by gates, in place, as 2^n (1 + x) with |x| < 0.42.

    A power of 2 rounds nothing, and near 1, where n is 0, x is exact to its own last digits (else
    log g less n log 2 is rounded): g itself, or 1 + (g - 1) of a closed gate, would be off by the
    same amount in all steps.
    """
    power = (log_gate / math.log(2)).round()
    sums.mul_(power.exp2())
    sums.addcmul_(sums, (log_gate - power * math.log(2)).expm1())


def pairs(until_i: Tensor, before_i: Tensor, until_j: Tensor, before_j: Tensor) -> Tensor:
    """Returns the sums of logarithms of gates over (j, i] for j ≤ i, and over [i, j) for j > i.

    Given are sums over the positions until and before each, (..., rows, 1): one of the differences
    is a sum of logarithms, which are below 0, and the other is the negative of one.
    """
    return torch.minimum(until_i - until_j.mT, before_j.mT - before_i)
