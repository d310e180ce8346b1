"""Accuracy and perplexity on residues, beside the empirical and the uniform baseline.

Masked: arXiv 1810.04805, on the masked positions only. Causal: every residue from those before it.
Perplexity is exp(total nats / count); sums are divided once (arXiv 2009.14794, C.2).
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from protlm.data.batching import SPECIALS, BatchStream
from protlm.data.buckets import LengthBuckets
from protlm.data.dataset import Batch, SequenceDataset
from protlm.data.masking import IGNORE, MaskingRule
from protlm.data.mixture import SampleOrder
from protlm.data.order import EpochOrder
from protlm.data.shards import SplitReader
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.errors import UserError
from protlm.evaluation.base import Evaluation, EvaluationData
from protlm.evaluation.baseline import Unigram, count_residues
from protlm.model.objective import perplexity, target_sums
from protlm.model.pretrained import PretrainedModel

# As many sequences give each residue's frequency to four digits; all of TrEMBL would take an hour.
_MOST_COUNTED = 1 << 20


class Accuracy(Evaluation):
    """Masked or causal accuracy and perplexity of a model on a split.

    What is masked in a sequence depends on `seed` and the sequence's place in the split alone.

    Args:
        objective: `masked` or `causal`.
        fraction: the share of residues that are masked; every one of them becomes `<mask>`.
        seed: what the masked positions are drawn from.
    """

    def __init__(self, *, objective: str, fraction: float = 0.15, seed: int = 0) -> None:
        if objective not in ("masked", "causal"):
            raise UserError(f"objective={objective} is not one of: causal, masked")
        self.objective = objective
        self.masking = MaskingRule(fraction=fraction, mask_share=1.0, random_share=0.0)
        self.seed = seed

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns the model's and both baselines' accuracy and perplexity, and the counts."""
        assert data is not None
        max_length = int(model.description["max_length"])
        unigram = Unigram.from_counts(count_residues(_some(data.train, max_length - SPECIALS)))
        sums = torch.zeros(3, dtype=torch.float64)
        base = [0.0, 0, 0]
        for batch in self._batches(data, max_length):
            targets_BL = _residues_only(batch.targets_BL)
            sums += self._score(model, batch, targets_BL)
            chosen = targets_BL[targets_BL != IGNORE].numpy()
            base = [a + b for a, b in zip(base, unigram.score(chosen), strict=True)]
        nats, correct, count = sums.tolist()
        if not count:
            raise UserError("the split holds no residue to predict; choose another split")
        return {
            "model": ratio(nats, correct, count),
            "empirical": ratio(*base),
            "uniform": ratio(count * math.log(len(STANDARD)), count / len(STANDARD), count),
            "targets": int(count),
            "sequences": len(data.split),
            "trained_as": model.description["objective"],
        }

    def _batches(self, data: EvaluationData, max_length: int) -> DataLoader[Batch]:
        dataset = SequenceDataset(
            data.split, objective=self.objective, masking=self.masking, seed=self.seed
        )
        stream = BatchStream(
            data.split.lengths_of,
            SampleOrder([len(data.split)], shuffle=False),
            LengthBuckets(data.tokens_per_batch, max_length),
        )
        return DataLoader(dataset, sampler=stream, batch_size=None, collate_fn=lambda batch: batch)

    @torch.inference_mode()
    def _score(
        self, model: PretrainedModel, batch: Batch, targets_BL: torch.Tensor
    ) -> torch.Tensor:
        device = model.device
        out = model.network(
            batch.tokens_BL.to(device),
            batch.mask_BL.to(device),
            causal=self.objective == "causal",
        )
        return target_sums(out.logits_BLV, targets_BL.to(device)).stacked().cpu()


def _some(split: SplitReader, max_residues: int) -> Iterator[np.ndarray]:
    """The sequences of a split, cropped; of a large one a random sample, always the same."""
    order = EpochOrder(len(split), seed=0, epoch=0)
    for sample in order[np.arange(min(len(split), _MOST_COUNTED))].tolist():
        yield split[sample][:max_residues]


def _residues_only(targets_BL: torch.Tensor) -> torch.Tensor:
    """Leaves the end of the sequence out, so that baselines and model are asked the same."""
    is_residue = torch.from_numpy(VOCABULARY.is_residue)
    keep_BL = (targets_BL != IGNORE) & is_residue[targets_BL.clamp(min=0)]
    return targets_BL.masked_fill(~keep_BL, IGNORE)


def ratio(nats: float, correct: float, count: float) -> dict[str, float]:
    """Accuracy and perplexity from sums.

    >>> ratio(0.0, 3, 4)
    {'accuracy': 0.75, 'perplexity': 1.0}
    """
    return {"accuracy": correct / count, "perplexity": perplexity(nats, count)}
