"""A family: a query and its relatives, with their positions in the query and their weights."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

# Relatives are neighbors from this identity on, in percent.
NEIGHBORS = 80
# Rows of a tile, whose counts stay in the processor's cache.
_ROWS = 1024
# Columns that are counted in one byte.
_COLUMNS = 255
# No letter: differs from the 0 of a gap, so that gaps do not agree.
_OTHER_GAP = 255


class Relative(NamedTuple):
    """A relative of a query.

    `residues` are in upper case and without gaps. `identity` is the fraction of the query's
    residues in whose columns both have the same letter, or what the file says; None if unknown.
    `columns`, int32 [residues], are the positions in the query, from 0: an insertion has that of
    the column before it; residues of a whole protein around its aligned part continue the
    numbering, below 0 and beyond the last. `letters`, uint8 [residues of the query], are those
    that are aligned to the query's, 0 for none. Both are None without an alignment.
    """

    name: str
    residues: str
    identity: float | None = None
    columns: np.ndarray | None = None
    letters: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Family:
    """A query and its relatives: those of its file that are left after the filters, in its order.

    Args:
        query: its residues.
        name: its name, or "".
        digest: SHA-256 of the file, or of the sorted sequences of a list.
        counts: records that are not relatives, by reason.
        source: what was read, in words.
        is_uniform: whether all relatives have one weight; it is so without an alignment.
    """

    query: str
    name: str
    relatives: tuple[Relative, ...]
    digest: str
    counts: Mapping[str, int] = field(default_factory=dict)
    source: str = ""
    is_uniform: bool = True

    @cached_property
    def keys(self) -> np.ndarray:
        """What draws depend on, so that the order of relatives does not count; uint64."""
        return keys_of(self.relatives)

    @cached_property
    def weights(self) -> np.ndarray:
        """Weights of the relatives in draws, float64: 1 over their neighbors, or 1."""
        rows = [one.letters for one in self.relatives if one.letters is not None]
        if self.is_uniform or not rows:
            return np.ones(len(self.relatives))
        return 1 / num_neighbors(np.stack(rows))

    def __str__(self) -> str:
        """Says in one line what was read, and how many records are left out for which reason."""
        drawn = "uniform" if self.is_uniform else f"1/neighbors at {NEIGHBORS} % identity"
        counted = ", ".join(f"{number:,} {reason}" for reason, number in self.counts.items())
        left_out = f"; left out: {counted}" if counted else ""
        number = len(self.relatives)
        relatives = f"{number:,} relative{'s' * (number != 1)} (weights: {drawn})"
        return f"{self.source}: {relatives}{left_out}"


def keys_of(relatives: Sequence[Relative]) -> np.ndarray:
    """Returns a number for each relative that depends on its residues alone, uint64."""
    digests = (hashlib.sha256(one.residues.encode()).digest() for one in relatives)
    return np.array([int.from_bytes(digest[:8], "big") for digest in digests], np.uint64)


def num_neighbors(letters: np.ndarray) -> np.ndarray:
    """Counts the rows that are at least 80 % identical to each row, itself included.

    The identity of two rows is the number of columns in which both have the same letter, divided by
    the letters of the shorter: it is symmetric, and a fragment is a neighbor of the whole.

    Args:
        letters: uint8 [rows, columns], 0 for a gap.

    Returns:
        int64 [rows].

    >>> num_neighbors(np.frombuffer(b"MKVLAMKVLCMKVWW", np.uint8).reshape(3, 5)).tolist()
    [2, 2, 1]
    """
    sizes = (letters != 0).sum(1)
    columns = np.ascontiguousarray(letters.T)
    others = np.where(columns == 0, np.uint8(_OTHER_GAP), columns)
    number = np.zeros(len(letters), np.int64)
    for i in range(0, len(letters), _ROWS):
        for j in range(i, len(letters), _ROWS):
            one, other = slice(i, i + _ROWS), slice(j, j + _ROWS)
            agreeing = _num_agreeing(columns[:, one], others[:, other])
            shorter = np.minimum(sizes[one, None], sizes[other])
            # In whole numbers, since 0.8 is not one of binary fractions; a gap alone is no letter.
            near = 100 * agreeing >= NEIGHBORS * np.maximum(shorter, 1)
            number[one] += near.sum(1)
            if i < j:
                number[other] += near.sum(0)
    # A row without a letter is its only neighbor.
    return np.maximum(number, 1)


def _num_agreeing(columns: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Counts the columns in which rows agree with others; int32 [rows, others]."""
    number = np.zeros((columns.shape[1], others.shape[1]), np.int32)
    for begin in range(0, len(columns), _COLUMNS):
        counted, some = np.zeros(number.shape, np.uint8), slice(begin, begin + _COLUMNS)
        for one, other in zip(columns[some], others[some], strict=True):
            counted += one[:, None] == other
        number += counted
    return number
