"""Batches of proteins with labels, in an order that is a pure function of seed and epoch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from protlm.data.dataset import collate


@dataclass(frozen=True)
class LabeledTokens:
    """Residue tokens, uint8, and their targets: floats, class numbers or rows of booleans."""

    tokens: Sequence[np.ndarray]
    values: np.ndarray


@dataclass
class TokenRows:
    """A batch; `place` is its epoch and number, which seed dropout."""

    tokens_BL: Tensor
    mask_BL: Tensor
    values: Tensor
    place: tuple[int, int]


class Batches(Dataset[TokenRows]):
    """The batches of an epoch; their order is a pure function of the seed and the epoch.

    Args:
        data: the examples.
        batch_size: proteins per batch; the last one may be smaller.
        seed: seed of the order; None keeps the order of the examples.
    """

    def __init__(self, data: LabeledTokens, batch_size: int, *, seed: int | None) -> None:
        self._data, self._batch_size, self._seed = data, batch_size, seed
        self.epoch = 0

    def __len__(self) -> int:
        return math.ceil(len(self._data.tokens) / self._batch_size)

    def __getitem__(self, number: int) -> TokenRows:
        """Returns a batch of the current epoch."""
        order = np.arange(len(self._data.tokens))
        if self._seed is not None:
            order = np.random.default_rng([self._seed, self.epoch]).permutation(order)
        rows = order[number * self._batch_size :][: self._batch_size]
        tokens_BL, mask_BL = collate([self._data.tokens[row] for row in rows])
        values = torch.from_numpy(self._data.values[rows])
        return TokenRows(tokens_BL, mask_BL, values, (self.epoch, number))
