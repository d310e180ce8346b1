"""K-mer sketches of sequences, and the search for the sequence that contains most of a sketch.

The sketch of a sequence consists of its 64 distinct k-mers with the smallest hashes, which is a
uniform sample. The fraction of a sketch that another sequence contains, anywhere, estimates the
fraction of the k-mers. If each residue is conserved independently with probability p, it is p^k.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from protlm.data.splitmix64 import splitmix64
from protlm.data.vocabulary import STANDARD, VOCABULARY

K = 6
SKETCH_SIZE = 64

_LETTERS = len(STANDARD)
# A number for each k-mer of standard residues, and one for all others.
_NO_KMER = _LETTERS**K
_FIRST = min(VOCABULARY[letter] for letter in STANDARD)
_BREAK = np.full(1, VOCABULARY["X"], np.uint8)
_PAIRS = 1 << 23


def kmers(tokens: np.ndarray) -> np.ndarray:
    """Returns the number of the k-mer that begins at each residue, uint32 [num_residues - K + 1].

    Args:
        tokens: residues, uint8 [num_residues]; k-mers with X, B, U, Z or O are excluded.
    """
    digits = tokens.astype(np.uint32) - _FIRST
    if len(digits) < K:
        return np.zeros(0, np.uint32)
    pairs = digits[:-1] * _LETTERS + digits[1:]
    numbers = (pairs[:-4] * _LETTERS**2 + pairs[2:-2]) * _LETTERS**2 + pairs[4:]
    foreign = np.flatnonzero(digits >= _LETTERS)
    for shift in range(K):
        first = foreign - shift
        numbers[first[(first >= 0) & (first < len(numbers))]] = _NO_KMER
    return numbers


def sketch(tokens: np.ndarray) -> np.ndarray:
    """Returns the distinct k-mers of a sequence with the smallest hashes, uint32 [<= 64]."""
    numbers = np.unique(kmers(tokens))
    if len(numbers) and numbers[-1] == _NO_KMER:
        numbers = numbers[:-1]
    if len(numbers) <= SKETCH_SIZE:
        return numbers
    hashes = splitmix64(numbers.astype(np.uint64))
    return numbers[np.argpartition(hashes, SKETCH_SIZE)[:SKETCH_SIZE]]


class SketchIndex:
    """Finds, for each sketch, the largest part that any one of many sequences contains.

    Sequences are searched in batches and not stored. Memory is 16 bytes for each k-mer of the
    sketches plus a constant 256 MB.

    Args:
        sketches: sketches of the query sequences.
    """

    def __init__(self, sketches: Sequence[np.ndarray]) -> None:
        self._sizes = np.array([len(one) for one in sketches], np.int64)
        # The highest number of shared k-mers so far, int64 [num_sketches].
        self._best = np.zeros(len(sketches), np.int64)
        all_kmers = np.concatenate([*sketches, np.zeros(0, np.uint32)])
        order = np.argsort(all_kmers, kind="stable")
        self._owners = np.repeat(np.arange(len(sketches)), self._sizes)[order]
        different, starts = np.unique(all_kmers[order], return_index=True)
        self._starts = np.append(starts, len(order))
        self._row_of = np.full(_NO_KMER + 1, -1, np.int32)
        self._row_of[different] = np.arange(len(different))

    @property
    def highest_shared_fractions(self) -> np.ndarray:
        """Highest fraction of each sketch that one sequence contained, float64 [num_sketches].

        NaN for sketches without a k-mer.
        """
        return np.divide(
            self._best, self._sizes, where=self._sizes > 0, out=np.full(len(self._sizes), np.nan)
        )

    def search(self, sequences: Sequence[np.ndarray]) -> None:
        """Compares sequences, uint8 tokens, with all sketches."""
        # A letter that occurs in no k-mer separates adjacent sequences.
        tokens = np.concatenate([part for one in sequences for part in (one, _BREAK)])
        ends = np.cumsum([len(one) + 1 for one in sequences])
        rows = self._row_of[kmers(tokens)]
        places = np.flatnonzero(rows >= 0)
        numbers = np.searchsorted(ends, places, side="right")
        # A k-mer that a sequence repeats is counted once.
        hits = np.unique(numbers * len(self._starts) + rows[places])
        numbers, rows = np.divmod(hits, len(self._starts))
        for part in self._parts(numbers, rows):
            self._count(numbers[part], rows[part])

    def _parts(self, numbers: np.ndarray, rows: np.ndarray) -> list[slice]:
        """Splits hits between sequences, so that the pairs of each part fit in memory."""
        num_pairs = np.cumsum(self._starts[rows + 1] - self._starts[rows])
        borders = np.flatnonzero(np.diff(numbers)) + 1
        parts_at = num_pairs[borders - 1] // _PAIRS
        cuts = borders[np.flatnonzero(np.diff(parts_at)) + 1] if len(borders) else borders
        edges = [0, *cuts.tolist(), len(rows)]
        return [slice(start, stop) for start, stop in pairwise(edges)]

    def _count(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        """Counts the k-mers that each sequence has in common with each sketch."""
        repeats = self._starts[rows + 1] - self._starts[rows]
        firsts = np.repeat(self._starts[rows] - np.cumsum(repeats) + repeats, repeats)
        owners = self._owners[firsts + np.arange(len(firsts))]
        pairs = np.repeat(numbers, repeats) * len(self._sizes) + owners
        different, shared = np.unique(pairs, return_counts=True)
        np.maximum.at(self._best, different % len(self._sizes), shared)
