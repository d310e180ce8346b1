"""The division of a file's proteins into parts and batches, and the bytes of their vectors.

Equal sequences are computed once. A unit is a number of consecutive distinct sequences, which are
in memory together; its batches have similar lengths, and some of its batches are a part, which is
one file. Everything depends only on the proteins and the options, so that every process computes
the same batches.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from protlm.data.batching.plan import SPECIALS
from protlm.model.embedding import batches

# A unit has at most this number of sequences, and of residues unless it is one protein.
_SEQUENCES, _RESIDUES = 2_048, 1 << 20
# Units of fewer sequences, so that a small file has this number of them to divide; units below the
# second number would have much padding.
_UNITS, _LEAST = 16, 384
# A part has no more batches once it has this number of residues, which is some seconds of work: of
# a large file more, so that there are not too many files.
_PART_RESIDUES, _PARTS = 1 << 15, 4_096


class Part(NamedTuple):
    """A part by its number, and the records of each of its batches, by number."""

    number: int
    batches: list[np.ndarray]


class Plan:
    """The parts of a file, given the length, vector size and first equal record of each record.

    `units` has the parts of each unit, and `distinct` the first record of each sequence.
    """

    def __init__(
        self, lengths: np.ndarray, first: np.ndarray, num_bytes: np.ndarray, tokens_per_batch: int
    ) -> None:
        self.lengths, self.first, self.num_bytes = lengths, first, num_bytes
        self.distinct = np.flatnonzero(first == np.arange(len(first)))
        self.units: list[list[Part]] = []
        self.parts: list[Part] = []
        residues = max(_PART_RESIDUES, int(lengths[self.distinct].sum()) // _PARTS)
        for start, end in _cuts(lengths[self.distinct]):
            records = self.distinct[start:end]
            some = batches(lengths[records].tolist(), tokens_per_batch)
            groups = self._groups([records[batch] for batch in some], residues)
            self.units.append([Part(n, group) for n, group in enumerate(groups, len(self.parts))])
            self.parts += self.units[-1]
        self._part_of, self._offset = np.zeros((2, len(lengths)), np.int64)
        for part in self.parts:
            members = np.concatenate(part.batches)
            self._part_of[members] = part.number
            self._offset[members] = np.cumsum(num_bytes[members]) - num_bytes[members]

    def residues(self, records: Sequence[np.ndarray]) -> int:
        """Returns the residues of the records in batches."""
        return sum(int(self.lengths[batch].sum()) for batch in records)

    def bytes_of(self, part: Part) -> int:
        """Returns the bytes of the vectors of a part."""
        return sum(int(self.num_bytes[batch].sum()) for batch in part.batches)

    def place(self, record: int) -> tuple[int, slice]:
        """Returns the part with the vectors of a record, perhaps of an equal one, and its bytes."""
        first = int(self.first[record])
        start = int(self._offset[first])
        return int(self._part_of[first]), slice(start, start + int(self.num_bytes[first]))

    def padding(self) -> float:
        """Returns the fraction of the positions in batches that are padding."""
        used = positions = 0
        for batch in (batch for part in self.parts for batch in part.batches):
            lengths = self.lengths[batch] + SPECIALS
            used += int(lengths.sum())
            positions += int(lengths.max()) * len(lengths)
        return 1 - used / positions if positions else 0.0

    def _groups(self, made: list[np.ndarray], residues: int) -> Iterator[list[np.ndarray]]:
        """Yields batches in groups of a number of residues, or a little more."""
        group: list[np.ndarray] = []
        for batch in made:
            group.append(batch)
            if self.residues(group) >= residues:
                yield group
                group = []
        if group:
            yield group


def first_equal(digests: np.ndarray) -> np.ndarray:
    """Returns for each row, n × 16 bytes, the index of the first row that equals it."""
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
