"""The loss as a total and a count, which are summed over batches and ranks and divided once."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.data.masking import IGNORE
from protlm.data.vocabulary import VOCABULARY


@dataclass(frozen=True)
class TargetSums:
    """Sums over targets: nats of cross-entropy, correct predictions, number of targets."""

    nats: Tensor
    correct: Tensor
    count: Tensor

    def stacked(self) -> Tensor:
        """Returns the three sums as one float64 vector."""
        return torch.stack([self.nats.double(), self.correct.double(), self.count.double()])


def residues_only(targets_BL: Tensor) -> Tensor:
    """Ignores the ends of sequences, so that causal and masked models have the same targets."""
    is_residue_V = torch.from_numpy(VOCABULARY.is_residue).to(targets_BL.device)
    keep_BL = (targets_BL != IGNORE) & is_residue_V[targets_BL.clamp(min=0)]
    return targets_BL.masked_fill(~keep_BL, IGNORE)


def target_sums(logits_BLV: Tensor, targets_BL: Tensor) -> TargetSums:
    """Computes cross-entropy and accuracy at the targets, in float32."""
    # A GPU would be waited for until it has counted the targets.
    return (_sums_everywhere if logits_BLV.is_cuda else _sums_at_targets)(logits_BLV, targets_BL)


def _sums_at_targets(logits_BLV: Tensor, targets_BL: Tensor) -> TargetSums:
    """Computes the softmax only at positions with a target, usually 15 % of them if masked."""
    chosen = targets_BL != IGNORE
    logits = logits_BLV[chosen].float()
    targets = targets_BL[chosen]
    nats = F.cross_entropy(logits, targets, reduction="sum")
    correct = (logits.argmax(-1) == targets).sum()
    return TargetSums(nats, correct, chosen.sum())


def _sums_everywhere(logits_BLV: Tensor, targets_BL: Tensor) -> TargetSums:
    """Computes the softmax at all positions; the shapes do not depend on the targets."""
    chosen_BL = targets_BL != IGNORE
    # Values at other positions, NaN included, have no influence.
    logits = logits_BLV.float().masked_fill(~chosen_BL[..., None], 0).flatten(0, 1)
    targets = targets_BL.flatten()
    nats = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    correct = (logits.argmax(-1) == targets).sum()
    return TargetSums(nats, correct, chosen_BL.sum())


def perplexity(nats: float, count: float) -> float:
    """Returns exp(nats / count), limited to the range of a float.

    >>> perplexity(0.0, 3), perplexity(1e9, 1) < float("inf")
    (1.0, True)
    """
    return math.exp(min(nats / count, 700.0))
