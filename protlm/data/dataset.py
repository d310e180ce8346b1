"""From planned batches to tensors of tokens and targets."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from protlm.data.batching import FILLER, SPECIALS, BatchPlan
from protlm.data.masking import IGNORE, MaskingRule, corrupt, crop, sample_rng
from protlm.data.shards import SplitReader
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import UserError

OBJECTIVES = ("masked", "causal")


@dataclass
class Batch:
    """A rank's rows of a step.

    Attributes:
        tokens_BL: inputs, int64.
        targets_BL: tokens to predict, int64; `IGNORE` where there is none.
        mask_BL: true at residues and special tokens, false at padding.
        samples_B: the samples' numbers in the split, int64; -1 for rows that only fill up.
        after: epoch and samples of the progress once the batch is consumed.
    """

    tokens_BL: Tensor
    targets_BL: Tensor
    mask_BL: Tensor
    samples_B: Tensor
    after: tuple[int, int]


@final
class SequenceDataset(Dataset[Batch]):
    """Makes batches from plans; a row is a pure function of (seed, epoch, sample).

    A row is `<cls>`, residues, `<eos>`. Of a cropped sequence `<eos>` stands only where the
    sequence truly ends.

    Args:
        sequences: the split.
        objective: `masked`, whose targets are corrupted residues, or `causal`, whose targets
            are the tokens that follow.
        masking: the corruption of `masked`.
        max_length: tokens of a row at most, special ones included.
        crop: `prefix` or `random`, what is taken of longer sequences.
        seed: of corruption and cropping.

    Raises:
        UserError: an unknown objective.
    """

    def __init__(
        self,
        sequences: SplitReader,
        *,
        objective: str,
        masking: MaskingRule,
        max_length: int,
        crop: str,
        seed: int,
    ) -> None:
        if objective not in OBJECTIVES:
            raise UserError(f"objective={objective} is unknown; choose masked or causal")
        self._sequences, self._objective, self._masking = sequences, objective, masking
        self._max_length, self._crop, self._seed = max_length, crop, seed

    def __getitem__(self, plan: BatchPlan) -> Batch:
        """The batch of a plan."""
        shape = (len(plan.samples), plan.length)
        tokens_BL = np.full(shape, VOCABULARY.pad, dtype=np.int64)
        targets_BL = np.full(shape, IGNORE, dtype=np.int64)
        mask_BL = np.zeros(shape, dtype=bool)
        for row, sample in enumerate(plan.samples.tolist()):
            inputs, targets = self._row(plan.epoch, sample)
            tokens_BL[row, : len(inputs)] = inputs
            targets_BL[row, : len(targets)] = targets
            mask_BL[row, : len(inputs)] = True
        return Batch(
            torch.from_numpy(tokens_BL),
            torch.from_numpy(targets_BL),
            torch.from_numpy(mask_BL),
            torch.from_numpy(plan.samples.copy()),
            (plan.after.epoch, plan.after.samples),
        )

    def _row(self, epoch: int, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of a sample."""
        if sample == FILLER:
            return np.array([VOCABULARY.cls]), np.array([IGNORE])
        rng = sample_rng(self._seed, epoch, sample)
        residues = self._sequences[sample]
        part = crop(len(residues), self._max_length - SPECIALS, self._crop, rng)
        end = [VOCABULARY.eos] if part.stop == len(residues) else []
        tokens = np.concatenate(([VOCABULARY.cls], residues[part], end)).astype(np.int64)
        if self._objective == "causal":
            return tokens, np.append(tokens[1:], IGNORE)
        return corrupt(tokens, VOCABULARY.is_residue[tokens], self._masking, rng)


def collate(sequences: list[np.ndarray], *, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Puts whole sequences of residue tokens between `<cls>` and `<eos>`, padded to `length`.

    Returns:
        tokens_BL, int64, and mask_BL, true where there is no padding.

    >>> collate([VOCABULARY.encode("MK")], length=5)[0].tolist()
    [[0, 20, 15, 2, 1]]
    """
    longest = max((len(residues) for residues in sequences), default=0) + SPECIALS
    length = longest if length is None else length
    assert longest <= length
    tokens_BL = torch.full((len(sequences), length), VOCABULARY.pad)
    mask_BL = torch.zeros(len(sequences), length, dtype=torch.bool)
    for row, residues in enumerate(sequences):
        end = len(residues) + 1
        tokens_BL[row, 0], tokens_BL[row, end] = VOCABULARY.cls, VOCABULARY.eos
        tokens_BL[row, 1:end] = torch.from_numpy(residues.astype(np.int64))
        mask_BL[row, : end + 1] = True
    return tokens_BL, mask_BL


def cropped(lengths: np.ndarray, max_length: int) -> tuple[int, int]:
    """How many sequences of these lengths are cropped in an epoch, and residues left out.

    >>> cropped(np.array([5, 8, 20]), max_length=10)
    (1, 12)
    """
    left_out = np.maximum(lengths + SPECIALS - max_length, 0)
    return int(np.count_nonzero(left_out)), int(left_out.sum())
