"""The division of a file's proteins into blocks and batches, and the bytes of their vectors.

Equal sequences are computed once. A group of blocks has consecutive distinct sequences, which
are in memory together; its batches have similar lengths, and some of them are a block, which is
one file. Everything depends only on the proteins and the options, so that every process computes
the same batches.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from protlm.model.embedding import batches
from protlm.system.memory import blocks_of

# A group has at most this number of sequences, and of residues unless it is one protein.
_SEQUENCES, _RESIDUES = 2_048, 1 << 20
# A small file is cut into 16 groups, to have shares to divide, but no group has fewer than 384
# sequences, or padding would grow.
_GROUPS, _LEAST = 16, 384
# A block has no more batches once it has this number of residues, which is some seconds of work: of
# a large file more, so that there are not too many files.
_BLOCK_RESIDUES, _BLOCKS = 1 << 15, 4_096


class Block(NamedTuple):
    """A block by its number, and the records of each of its batches, by number."""

    number: int
    batches: list[np.ndarray]


class Plan:
    """The blocks of a file, given the length, vector size and first equal record of each record.

    `groups` has the blocks of each group, and `distinct` the first record of each sequence. Where
    proteins are computed `one_by_one`, each is a batch and, of a small file, a block.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        first: np.ndarray,
        num_bytes: np.ndarray,
        tokens_per_batch: int,
        *,
        around: int,
        one_by_one: bool = False,
    ) -> None:
        self.lengths, self.first, self.num_bytes = lengths, first, num_bytes
        # Of tokens beside the residues of a protein.
        self._around = around
        self.distinct = np.flatnonzero(first == np.arange(len(first)))
        self.groups: list[list[Block]] = []
        self.blocks: list[Block] = []
        most, least = (1, 1) if one_by_one else (tokens_per_batch, _BLOCK_RESIDUES)
        residues = max(least, int(lengths[self.distinct].sum()) // _BLOCKS)
        for start, end in _cuts(lengths[self.distinct]):
            records = self.distinct[start:end]
            places = batches(lengths[records].tolist(), most, around=around)
            contents = blocks_of(
                (records[batch] for batch in places), lambda one: self.residues([one]), residues
            )
            self.groups.append([Block(n, x) for n, x in enumerate(contents, len(self.blocks))])
            self.blocks += self.groups[-1]
        self._block_of, self._offset = np.zeros((2, len(lengths)), np.int64)
        for block in self.blocks:
            members = np.concatenate(block.batches)
            self._block_of[members] = block.number
            self._offset[members] = np.cumsum(num_bytes[members]) - num_bytes[members]

    def residues(self, records: Sequence[np.ndarray]) -> int:
        return sum(int(self.lengths[batch].sum()) for batch in records)

    def bytes_of(self, block: Block) -> int:
        return sum(int(self.num_bytes[batch].sum()) for batch in block.batches)

    def place(self, record: int) -> tuple[int, slice]:
        """Returns the block with the vectors of a record, or of an equal one, and its bytes."""
        first = int(self.first[record])
        start = int(self._offset[first])
        return int(self._block_of[first]), slice(start, start + int(self.num_bytes[first]))

    def padding(self) -> float:
        """Returns the fraction of the positions in batches that are padding."""
        each = [self.lengths[batch] for block in self.blocks for batch in block.batches]
        used = sum(int((one + self._around).sum()) for one in each)
        positions = sum((int(one.max()) + self._around) * len(one) for one in each)
        return 1 - used / positions if positions else 0.0


def first_equal(digests: np.ndarray) -> np.ndarray:
    """Returns for each row, n × 16 bytes, the index of the first row that equals it."""
    keys = np.ascontiguousarray(digests).view("S16").ravel()
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return first[inverse.ravel()] if len(keys) else np.zeros(0, np.int64)


def _cuts(lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    start, residues = 0, 0
    most = min(max(len(lengths) // _GROUPS, _LEAST), _SEQUENCES)
    for index, length in enumerate(lengths.tolist()):
        is_full = index - start == most or residues + length > _RESIDUES
        if index > start and is_full:
            yield start, index
            start, residues = index, 0
        residues += length
    if len(lengths):
        yield start, len(lengths)
