"""The batches of the training benchmark: real proteins in full rows or in length buckets.

protlm's own loader code makes them, and all models train on the same ones.
"""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import final

import numpy as np

from protlm.data.batching.mixture import SampleOrder
from protlm.data.batching.plan import BatchingStrategy, BatchStream, Progress
from protlm.data.dataset import Batch, SequenceDataset
from protlm.data.masking import MaskingRule
from protlm.data.records import Tally, read_records
from protlm.data.vocabulary import VOCABULARY

_SEED = 0


@final
class Proteins:
    """The sequences of a file in memory, as tokens.

    Args:
        path: a sequence file.
    """

    def __init__(self, path: Path) -> None:
        records = read_records(path, Tally())
        self._tokens = [VOCABULARY.encode(record.sequence) for record in records]
        self._lengths = np.array([len(tokens) for tokens in self._tokens])

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, sample: int) -> np.ndarray:
        """Returns the tokens of the residues of a sequence, uint8."""
        return self._tokens[sample]

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Returns the numbers of residues of these sequences, int64."""
        return self._lengths[samples]


def batches(proteins: Proteins, rule: BatchingStrategy) -> Iterator[Batch]:
    """Yields masked batches without end, the same batches each time."""
    dataset = SequenceDataset(proteins, objective="masked", masking=MaskingRule(), seed=_SEED)
    order = SampleOrder([len(proteins)], seed=_SEED)
    for epoch in count():
        start = Progress(epoch)
        for plan in BatchStream(proteins.lengths_of, order, rule, start=start):
            yield dataset[plan]
