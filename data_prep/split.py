"""Split rules: by a hash of the sequence, or by a table."""

import sys
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from protlm.data.records import Record
from protlm.data.shards.manifest import SPLIT_NAME
from protlm.data.tables import SPLITS, excerpt, places_of, read_rows
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import sha256_of

TRAIN, VALID, TEST = "train", "valid", "test"
# In place of a split: why a record is left out.
HOMOLOG = "of train, at least 30 % identical over 80 % of a held-out sequence (MMseqs2)"


class SplitRule(Protocol):
    """Assigns records to splits.

    A rule reads its tables when it is constructed, and is immutable and small afterwards, so that
    forked processes share it. The split of a record depends only on the record and the rule.
    """

    @abstractmethod
    def split_of(self, record: Record, digest: bytes) -> str | None:
        """Returns the split, None for no split, or `HOMOLOG`.

        `digest` is the BLAKE2b-128 of its sequence.
        """

    def notes_of(self, record: Record, split: str) -> Iterable[str]:
        """Returns the reasons under which a record of `split` is counted as noted."""
        return ()

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Returns a description for the manifest; equal rules have equal descriptions."""


@final
@dataclass(frozen=True)
class HashSplit(SplitRule):
    """Splits by a hash of the sequence, so that identical sequences are in the same split.

    The split depends only on the sequence: it does not change when a file is reordered or extended.
    Homologs may be separated; if that matters, split by family or by cluster.
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
        """Returns `train`, `valid` or `test`, by the first 8 bytes of a hash."""
        place = int.from_bytes(digest[:8]) / 2**64
        if place >= self.valid_fraction + self.test_fraction:
            return TRAIN
        return VALID if place < self.valid_fraction else TEST

    def split_of(self, record: Record, digest: bytes) -> str:
        return self.side_of(digest)

    def describe(self) -> dict[str, Any]:
        return {
            "by": "blake2b-128 of the sequence",
            "valid_fraction": self.valid_fraction,
            "test_fraction": self.test_fraction,
        }


@final
class TableSplit(SplitRule):
    """Splits by a table of accessions; records that it does not list are in no split.

    The table is tab-separated, plain or gzip, with a header that names `accession` and `split`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._splits = _read_splits(path)

    def split_of(self, record: Record, digest: bytes) -> str | None:
        return self._splits.get(record.identifier)

    def describe(self) -> dict[str, Any]:
        return {"by": "table", "table": self.path.name, "sha256": sha256_of(self.path)}


def _read_splits(path: Path) -> dict[str, str]:
    rows = read_rows(path, "a split table")
    _, columns = next(rows)
    accession_column, split_column = places_of(path, columns, ("accession", "split"))
    splits: dict[str, str] = {}
    # One string per split serves all its accessions.
    names: dict[str, str] = {}
    for number, fields in rows:
        place = f"{path}, line {number}"
        if len(fields) != len(columns):
            raise InputDataError(
                f"{place}: {len(fields)} fields, not {len(columns)}, in {excerpt(fields)}"
            )
        accession, typed = fields[accession_column], fields[split_column]
        split = SPLITS.get(typed.lower(), typed)
        if not SPLIT_NAME.fullmatch(split):
            raise InputDataError(
                f"{place}: {typed!r:.80} is not a valid split name; use small letters, digits and _"
            )
        name = names.setdefault(typed, split)
        if splits.setdefault(accession, name) != name:
            raise InputDataError(
                f"{place}: {accession} is in {splits[accession]} and in {split}; a sequence has "
                "one split"
            )
    if meant := ", ".join(f"{a} as {b}" for a, b in names.items() if a != b):
        print(f"{path}: read {meant}", file=sys.stderr)
    return splits
