"""The loss, as a total and a count: they are summed over batches and ranks and divided once."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.data.masking import IGNORE


@dataclass(frozen=True)
class TargetSums:
    """Sums over targets: nats of cross-entropy, correct predictions, how many there were."""

    nats: Tensor
    correct: Tensor
    count: Tensor

    def stacked(self) -> Tensor:
        """The three sums in one float64 vector, ready to be added up and reduced."""
        return torch.stack([self.nats.double(), self.correct.double(), self.count.double()])


def target_sums(logits_BLV: Tensor, targets_BL: Tensor) -> TargetSums:
    """Cross-entropy and accuracy where there is a target, in float32."""
    chosen = targets_BL != IGNORE
    # Only the positions with a target go through the softmax: 15 % of them when masked.
    logits = logits_BLV[chosen].float()
    targets = targets_BL[chosen]
    nats = F.cross_entropy(logits, targets, reduction="sum")
    correct = (logits.argmax(-1) == targets).sum()
    return TargetSums(nats, correct, chosen.sum())


def perplexity(nats: float, count: float) -> float:
    """exp(nats / count), at most what a float holds.

    >>> perplexity(0.0, 3), perplexity(1e9, 1) < float("inf")
    (1.0, True)
    """
    return math.exp(min(nats / count, 700.0))
