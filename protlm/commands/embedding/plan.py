"""The division of a file's proteins into units and batches, and the bytes of their vectors.

Equal sequences are computed once. A unit is a number of consecutive distinct sequences; its batches
have similar lengths. Everything depends only on the proteins and the options, so that every process
computes the same batches.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from protlm.model.embedding import batches

# A unit has at most this number of sequences, and of residues unless it is one protein.
_SEQUENCES, _RESIDUES = 2_048, 1 << 20
# Units of fewer sequences, so that a small file has this number of them to divide; units below the
# second number would have much padding.
_UNITS, _LEAST = 16, 384
# The SHA-256 after the vectors of a batch.
DIGEST_BYTES = 32


class Batch(NamedTuple):
    """A batch: its records by number, and its place in the file of its unit.

    In the file: a status byte for each record, the vectors, the SHA-256 of both.
    """

    records: list[int]
    offset: int
    num_bytes: int


class Place(NamedTuple):
    """Where the vectors of a protein are: in the file of a unit, from a byte."""

    unit: int
    offset: int
    num_bytes: int


class Plan:
    """The units of a file.

    Args:
        lengths: residues of each record.
        first: for each record the number of the first one with the same sequence and ranges.
        num_bytes: bytes of the vectors of each record.
        tokens_per_batch: rows times length of a batch, at most.

    `units` has the distinct records of each unit, by number.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        first: np.ndarray,
        num_bytes: np.ndarray,
        tokens_per_batch: int,
    ) -> None:
        self.lengths, self.first, self.num_bytes = lengths, first, num_bytes
        self._tokens_per_batch = tokens_per_batch
        distinct = np.flatnonzero(first == np.arange(len(first)))
        self.units = [distinct[start:end] for start, end in _cuts(lengths[distinct])]
        self._unit_of, self._offset = np.zeros((2, len(lengths)), np.int64)
        for unit, records in enumerate(self.units):
            self._unit_of[records] = unit
            for batch in self.batches(unit):
                sizes = num_bytes[batch.records]
                before = np.cumsum(sizes) - sizes
                self._offset[batch.records] = batch.offset + len(batch.records) + before

    def batches(self, unit: int) -> list[Batch]:
        """Returns the batches of a unit."""
        records, found, offset = self.units[unit], [], 0
        for some in batches(self.lengths[records].tolist(), self._tokens_per_batch):
            members = records[some]
            size = len(members) + int(self.num_bytes[members].sum()) + DIGEST_BYTES
            found.append(Batch(members.tolist(), offset, size))
            offset += size
        return found

    def place(self, record: int) -> Place:
        """Returns where the vectors of a record are, perhaps those of an equal sequence."""
        first = int(self.first[record])
        unit, offset, size = (
            values[first] for values in (self._unit_of, self._offset, self.num_bytes)
        )
        return Place(int(unit), int(offset), int(size))

    def padding(self) -> float:
        """Returns the fraction of the positions in batches that are padding."""
        used = positions = 0
        for unit in range(len(self.units)):
            for batch in self.batches(unit):
                lengths = self.lengths[batch.records] + 2
                used += int(lengths.sum())
                positions += int(lengths.max()) * len(lengths)
        return 1 - used / positions if positions else 0.0


def first_equal(digests: np.ndarray) -> np.ndarray:
    """Returns for each row of bytes, n × 16, the number of the first equal one."""
    keys = np.ascontiguousarray(digests).view("S16").ravel()
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return first[inverse.ravel()] if len(keys) else np.zeros(0, np.int64)


def _cuts(lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    start, residues = 0, 0
    most = min(max(len(lengths) // _UNITS, _LEAST), _SEQUENCES)
    for index, length in enumerate(lengths.tolist()):
        is_full = index - start == most or residues + length > _RESIDUES
        if index > start and is_full:
            yield start, index
            start, residues = index, 0
        residues += length
    if len(lengths):
        yield start, len(lengths)
