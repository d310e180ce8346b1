"""The loss as a total and a count, which are summed over batches and ranks and divided once."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.data.masking import IGNORE


@dataclass(frozen=True)
class TargetSums:
    """Sums over targets: nats of cross-entropy, correct predictions, number of targets."""

    nats: Tensor
    correct: Tensor
    count: Tensor

    def stacked(self) -> Tensor:
        """Returns the three sums as one float64 vector."""
        return torch.stack([self.nats.double(), self.correct.double(), self.count.double()])


def target_sums(logits_BLV: Tensor, targets_BL: Tensor) -> TargetSums:
    """Computes cross-entropy and accuracy at the targets, in float32."""
    chosen = targets_BL != IGNORE
    # The softmax is computed only at positions with a target, usually 15 % of them if masked.
    logits = logits_BLV[chosen].float()
    targets = targets_BL[chosen]
    nats = F.cross_entropy(logits, targets, reduction="sum")
    correct = (logits.argmax(-1) == targets).sum()
    return TargetSums(nats, correct, chosen.sum())


def perplexity(nats: float, count: float) -> float:
    """Returns exp(nats / count), limited to the range of a float.

    >>> perplexity(0.0, 3), perplexity(1e9, 1) < float("inf")
    (1.0, True)
    """
    return math.exp(min(nats / count, 700.0))
