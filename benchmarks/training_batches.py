"""Batches of real proteins for training: in length buckets, at random and padded, or full rows.

All are made by protlm's own loader code; what differs is the rule by which samples become rows.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import final

import numpy as np

from protlm.data.batching import SPECIALS, BatchRule, BatchStream, Progress
from protlm.data.buckets import LengthBuckets
from protlm.data.concatenation import Concatenation
from protlm.data.dataset import Batch, SequenceDataset
from protlm.data.masking import MaskingRule
from protlm.data.mixture import SampleOrder
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

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, sample: int) -> np.ndarray:
        """Tokens of the residues of a sequence, uint8."""
        return self._tokens[sample]

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Residues of these sequences, int64."""
        return self._lengths[samples]

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens in self._tokens])


def bucketed(tokens_per_batch: int, max_length: int) -> BatchRule:
    """What protlm trains on: rows of similar length within a budget of tokens."""
    return LengthBuckets(tokens_per_batch, max_length)


def padded_to_the_longest(num_rows: int, max_length: int) -> BatchRule:
    """What a shuffling loader and a padding collator make: the next so many samples, as they come.

    Their rows are as long as the longest of them.
    """
    edges = tuple(range(SPECIALS + 1, max_length + 1))
    return LengthBuckets(num_rows * max_length, max_length, window=num_rows, bucket_edges=edges)


def full_rows(tokens_per_batch: int, length: int) -> BatchRule:
    """Rows without padding, of proteins that are joined by `<eos>`."""
    return Concatenation(tokens_per_batch, length)


def batches(proteins: Proteins, rule: BatchRule) -> Iterator[Batch]:
    """Yields masked batches without end, the same ones each time."""
    dataset = SequenceDataset(proteins, objective="masked", masking=MaskingRule(), seed=_SEED)
    order = SampleOrder([len(proteins)], seed=_SEED)
    for epoch in count():
        start = Progress(epoch)
        for plan in BatchStream(proteins.lengths_of, order, rule, start=start):
            yield dataset[plan]
