"""Batches of proteins with labels, in an order that is a pure function of seed and epoch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from protlm.data.dataset import collate

# Lightning sees a single endless epoch; the length of a run is given in optimizer steps.
_ENDLESS = 1_000_000_000


@dataclass(frozen=True)
class LabeledTokens:
    """Proteins and their labels.

    Attributes:
        tokens: of the residues, uint8.
        values: floats, class numbers or rows of booleans: one for each protein, or for each labeled
            residue in order.
        places: the labeled residues of each protein; None if whole proteins have labels.
    """

    tokens: Sequence[np.ndarray]
    values: np.ndarray
    places: Sequence[np.ndarray] | None = None

    @cached_property
    def ends(self) -> np.ndarray:
        """The number of labels before each protein, and that of all, int64 [proteins + 1]."""
        counts = [1] * len(self.tokens) if self.places is None else list(map(len, self.places))
        return np.cumsum([0, *counts])

    @property
    def groups(self) -> np.ndarray:
        """The protein of each label, int64 [labels]."""
        return np.repeat(np.arange(len(self.tokens)), np.diff(self.ends))


@dataclass
class TokenRows:
    """The part of a batch that one process computes.

    Attributes:
        tokens_BL: tokens with specials.
        mask_BL: true where there is a token.
        is_label_BL: true at residues with a label; None if whole proteins have labels.
        values: the labels, in the order of the rows and of the residues in them.
        rows: their rows in `LabeledTokens.values`, int64.
        is_used: false if this process has none of the batch's proteins, and computes one of others.
        place: the epoch, the batch and the process, which seed dropout.
    """

    tokens_BL: Tensor
    mask_BL: Tensor
    is_label_BL: Tensor | None
    values: Tensor
    rows: np.ndarray
    is_used: bool
    place: tuple[int, int, int]


class Batches(Dataset[TokenRows]):
    """Batches of labeled proteins: batch n of a run has the place n mod len(batches) in its epoch.

    Args:
        data: the examples.
        batch_size: proteins per batch, of all processes; the last one may be smaller.
        seed: seed of the order of each epoch; None keeps the order of the examples.
        share: the number of this process and of all processes, which divide each batch.
    """

    def __init__(
        self,
        data: LabeledTokens,
        batch_size: int,
        *,
        seed: int | None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.data, self._batch_size, self._seed, self._share = data, batch_size, seed, share

    def __len__(self) -> int:
        return math.ceil(len(self.data.tokens) / self._batch_size)

    def __getitem__(self, number: int) -> TokenRows:
        """Returns this process's part of a batch."""
        epoch, number = divmod(number, len(self))
        order = np.arange(len(self.data.tokens))
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch]).permutation(order)
        batch = order[number * self._batch_size :][: self._batch_size]
        rank, parts = self._share
        mine = batch[rank::parts]
        # Every process has to compute something, also of a last batch that is smaller.
        used = mine if mine.size else batch[:1]
        return self._rows(used, is_used=mine.size > 0, place=(epoch, number, rank))

    def _rows(
        self, proteins: np.ndarray, *, is_used: bool, place: tuple[int, int, int]
    ) -> TokenRows:
        places, ends = self.data.places, self.data.ends.tolist()
        tokens_BL, mask_BL = collate([self.data.tokens[one] for one in proteins])
        is_label_BL = None
        if places is not None:
            is_label_BL = torch.zeros_like(mask_BL)
            for row, one in enumerate(proteins):
                # <cls> precedes the residues.
                is_label_BL[row, torch.from_numpy(places[one] + 1)] = True
        rows = np.concatenate([np.arange(ends[one], ends[one + 1]) for one in proteins])
        values = torch.from_numpy(self.data.values[rows])
        return TokenRows(tokens_BL, mask_BL, is_label_BL, values, rows, is_used, place)


class LabeledData(pl.LightningDataModule):
    """The batches of a run that learns labels, from its next step on, and of its validations.

    Args:
        train: the proteins that are trained on.
        valid: the proteins that decide when to stop.
        batch_size: proteins per step, of all processes.
        seed: seed of the order.
    """

    def __init__(
        self, train: LabeledTokens, valid: LabeledTokens, *, batch_size: int, seed: int
    ) -> None:
        super().__init__()
        self.train, self.valid, self._batch_size, self._seed = train, valid, batch_size, seed

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches of an epoch."""
        return math.ceil(len(self.train.tokens) / self._batch_size)

    @property
    def batches_per_validation(self) -> int:
        """The number of batches of a validation."""
        return math.ceil(len(self.valid.tokens) / self._batch_size)

    def train_dataloader(self) -> DataLoader[TokenRows]:
        """Returns an endless loader of batches that starts at the next step."""
        assert self.trainer is not None
        steps = range(self.trainer.global_step, _ENDLESS)
        return DataLoader(self._batches(self.train, self._seed), batch_size=None, sampler=steps)

    def val_dataloader(self) -> DataLoader[TokenRows]:
        """Returns a loader of the validation proteins."""
        return DataLoader(self._batches(self.valid, None), batch_size=None)

    def _batches(self, data: LabeledTokens, seed: int | None) -> Batches:
        assert self.trainer is not None
        share = (self.trainer.global_rank, self.trainer.world_size)
        return Batches(data, self._batch_size, seed=seed, share=share)
