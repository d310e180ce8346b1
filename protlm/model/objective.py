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
    """Computes cross-entropy and accuracy at the targets, in float32.

    The softmax is computed only at positions with a target, usually 15 % of them if masked; on a
    GPU, which would be waited for until it has counted them, at all positions.
    """
    chosen_BL = targets_BL != IGNORE
    if logits_BLV.is_cuda:
        # Values at other positions, NaN included, have no influence.
        logits = logits_BLV.float().masked_fill(~chosen_BL[..., None], 0).flatten(0, 1)
        targets = targets_BL.flatten()
    else:
        logits, targets = logits_BLV[chosen_BL].float(), targets_BL[chosen_BL]
    nats = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return TargetSums(nats, (logits.argmax(-1) == targets).sum(), chosen_BL.sum())


def perplexity(nats: float, count: float) -> float:
    """Returns exp(nats / count), limited to the range of a float.

    >>> perplexity(0.0, 3), perplexity(1e9, 1) < float("inf")
    (1.0, True)
    """
    return math.exp(min(nats / count, 700.0))
