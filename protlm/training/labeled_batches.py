"""Batches of proteins with labels, in an order that is a pure function of seed and epoch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from protlm.data.dataset import collate


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
        weight: 1 / labels of the whole batch; 0 if this process has none of its proteins.
        place: the epoch, the batch and the process, which seed dropout.
    """

    tokens_BL: Tensor
    mask_BL: Tensor
    is_label_BL: Tensor | None
    values: Tensor
    rows: np.ndarray
    weight: float
    place: tuple[int, int, int]


class Batches(Dataset[TokenRows]):
    """The batches of an epoch; their order is a pure function of the seed and the epoch.

    Args:
        data: the examples.
        batch_size: proteins per batch, of all processes; the last one may be smaller.
        seed: seed of the order; None keeps the order of the examples.

    Attributes:
        epoch: the epoch of the order.
        share: the number of this process and of all processes, which divide each batch.
    """

    def __init__(self, data: LabeledTokens, batch_size: int, *, seed: int | None) -> None:
        self.data, self._batch_size, self._seed = data, batch_size, seed
        self.epoch, self.share = 0, (0, 1)

    def __len__(self) -> int:
        return math.ceil(len(self.data.tokens) / self._batch_size)

    def __getitem__(self, number: int) -> TokenRows:
        """Returns this process's part of a batch of the current epoch."""
        order = np.arange(len(self.data.tokens))
        if self._seed is not None:
            order = np.random.default_rng([self._seed, self.epoch]).permutation(order)
        batch = order[number * self._batch_size :][: self._batch_size]
        rank, parts = self.share
        proteins = batch[rank::parts]
        ends = self.data.ends
        weight = 1 / float((ends[batch + 1] - ends[batch]).sum()) if proteins.size else 0.0
        # Every process has to compute something, also of a last batch that is smaller.
        return self._rows(proteins if proteins.size else batch[:1], weight, (number, rank))

    def _rows(self, proteins: np.ndarray, weight: float, place: tuple[int, int]) -> TokenRows:
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
        return TokenRows(
            tokens_BL, mask_BL, is_label_BL, values, rows, weight, (self.epoch, *place)
        )
