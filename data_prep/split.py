"""Which split a record belongs to: by a hash of its sequence, or by a table."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, final

from data_prep.tables import excerpt, read_rows
from protlm.data.manifest import is_split_name
from protlm.data.records import Record
from protlm.errors import InputDataError, UserError
from protlm.paths import sha256_of

TRAIN, VALID, TEST = "train", "valid", "test"
_COLUMNS = ("accession", "split")


class SplitRule(Protocol):
    """Says for each record which split it is in.

    A rule reads its tables when it is made, is small afterwards and never changes, so processes
    that are forked share it. Where a record goes depends on the record and the rule alone.
    """

    def split_of(self, record: Record, digest: bytes) -> str | None:
        """The name of the split, or None for a record that is in none.

        Args:
            record: the record.
            digest: BLAKE2b-128 of its sequence.
        """
        ...

    def notes_of(self, record: Record, split: str) -> Iterable[str]:
        """What ought to be counted as noted about a record that went to `split`."""
        ...

    def describe(self) -> dict[str, Any]:
        """The rule in words and numbers, for the manifest; equal rules give equal words."""
        ...


@final
@dataclass(frozen=True)
class HashSplit:
    """Splits by a hash of the sequence, so equal sequences fall on one side.

    The side is a function of the sequence alone: it stays when a file is reordered, read again, or
    appended to. Homologues may part; where that matters, split by family or by cluster.

    Args:
        valid_fraction: share of the sequences in `valid`.
        test_fraction: share of them in `test`; the rest is `train`.

    Raises:
        UserError: the fractions leave nothing to train on.
    """

    valid_fraction: float
    test_fraction: float

    def __post_init__(self) -> None:
        fractions = (self.valid_fraction, self.test_fraction)
        if not all(0 <= fraction < 1 for fraction in fractions) or sum(fractions) >= 1:
            raise UserError(
                f"valid_fraction={self.valid_fraction} and test_fraction={self.test_fraction} must "
                "be at least 0 and together less than 1"
            )

    def side_of(self, digest: bytes) -> str:
        """`train`, `valid` or `test`, by the first 8 bytes of a hash."""
        if digest >= self._end_of_test:
            return TRAIN
        return VALID if digest < self._end_of_valid else TEST

    @cached_property
    def _end_of_valid(self) -> bytes:
        return _first_place(self.valid_fraction)

    @cached_property
    def _end_of_test(self) -> bytes:
        return _first_place(self.valid_fraction + self.test_fraction)

    def split_of(self, record: Record, digest: bytes) -> str:
        """See `SplitRule.split_of`."""
        return self.side_of(digest)

    def notes_of(self, record: Record, split: str) -> Iterable[str]:
        """Nothing."""
        return ()

    def describe(self) -> dict[str, Any]:
        """See `SplitRule.describe`."""
        return {
            "by": "blake2b-128 of the sequence",
            "valid_fraction": self.valid_fraction,
            "test_fraction": self.test_fraction,
        }


def _first_place(fraction: float) -> bytes:
    """The first 8 bytes, big-endian, that are `fraction` of 2^64 or more as numbers."""
    # Found by the very division that says which side a number is on, which rounds.
    low, high = 0, 2**64 - 1
    while low < high:
        middle = (low + high) // 2
        if middle / 2**64 < fraction:
            low = middle + 1
        else:
            high = middle
    return low.to_bytes(8, "big")


@final
class TableSplit:
    """Splits by a table of accessions; records that it does not list are in none.

    Args:
        path: tab-separated, plain or gzip, with a header that names `accession` and `split`.

    Raises:
        InputDataError: the table is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._splits = _read_splits(path)

    def split_of(self, record: Record, digest: bytes) -> str | None:
        """See `SplitRule.split_of`."""
        return self._splits.get(record.identifier)

    def notes_of(self, record: Record, split: str) -> Iterable[str]:
        """Nothing."""
        return ()

    def describe(self) -> dict[str, Any]:
        """See `SplitRule.describe`."""
        return {"by": "table", "table": self.path.name, "sha256": sha256_of(self.path)}


def _read_splits(path: Path) -> dict[str, str]:
    rows = read_rows(path, "a split table")
    number, columns = next(rows)
    if not set(_COLUMNS) <= set(columns):
        raise InputDataError(
            f"{path}, line {number}: the columns are {columns!r:.200}; accession and split "
            "must be among them, separated by tabs"
        )
    accession_column, split_column = (columns.index(name) for name in _COLUMNS)
    splits: dict[str, str] = {}
    # All accessions of a split share one copy of its name.
    names: dict[str, str] = {}
    for number, fields in rows:
        place = f"{path}, line {number}"
        if len(fields) != len(columns):
            raise InputDataError(
                f"{place}: {len(fields)} fields, not {len(columns)}, in {excerpt(fields)}"
            )
        accession, split = fields[accession_column], fields[split_column]
        if not is_split_name(split):
            raise InputDataError(
                f"{place}: a split cannot be called {split!r:.80}; use small letters, digits and _"
            )
        name = names.setdefault(split, split)
        if splits.setdefault(accession, name) != name:
            raise InputDataError(
                f"{place}: {accession} is in {splits[accession]} and in {split}; a sequence has "
                "one split"
            )
    return splits
