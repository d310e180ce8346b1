"""Which split a record belongs to: by a table, or by a hash of its sequence."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from protlm.data.manifest import is_split_name
from protlm.data.records import Record
from protlm.data.records.source import TextSource
from protlm.errors import InputDataError, UserError
from protlm.paths import sha256_of

_COLUMNS = ("accession", "split")


class SplitRule(Protocol):
    """Says for each record which split it is in."""

    def split_of(self, record: Record) -> str | None:
        """The name of the split, or None for a record that is in none."""
        ...

    def describe(self) -> dict[str, Any]:
        """The rule in words and numbers, for the manifest."""
        ...


@dataclass(frozen=True)
class HashSplit:
    """Splits by a hash of the sequence, so equal sequences fall on one side.

    Homologues do not: for honest evaluation split whole families, by a table.

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

    def split_of(self, record: Record) -> str:
        """`train`, `valid` or `test`."""
        digest = hashlib.blake2b(record.sequence.encode("ascii"), digest_size=8).digest()
        place = int.from_bytes(digest, "big") / 2**64
        if place < self.valid_fraction:
            return "valid"
        return "test" if place < self.valid_fraction + self.test_fraction else "train"

    def describe(self) -> dict[str, Any]:
        """The rule for the manifest."""
        return {
            "by": "blake2b-64 of the sequence",
            "valid_fraction": self.valid_fraction,
            "test_fraction": self.test_fraction,
        }


@dataclass(frozen=True)
class TableSplit:
    """Splits by a table of accessions; records that it does not list are in none.

    Args:
        path: tab-separated, plain or gzip, with a header that names `accession` and `split`.
    """

    path: Path

    def split_of(self, record: Record) -> str | None:
        """The split of the record's accession.

        Raises:
            InputDataError: at the first call, the table is missing or damaged.
        """
        return self._splits.get(record.identifier)

    def describe(self) -> dict[str, Any]:
        """The rule for the manifest."""
        return {"by": "table", "table": self.path.name, "sha256": sha256_of(self.path)}

    @cached_property
    def _splits(self) -> dict[str, str]:
        splits: dict[str, str] = {}
        # All accessions of a split share one copy of its name.
        names: dict[str, str] = {}
        with TextSource(self.path, "a split table") as source:
            columns = source.text.readline().rstrip("\n").split("\t")
            if not set(_COLUMNS) <= set(columns):
                raise InputDataError(
                    f"{self.path}, line 1: the columns are {columns!r:.200}; accession and split "
                    "must be among them, separated by tabs"
                )
            accession_column, split_column = (columns.index(name) for name in _COLUMNS)
            for number, line in enumerate(source.text, start=2):
                fields = line.rstrip("\n").split("\t")
                if fields == [""]:
                    continue
                if len(fields) != len(columns):
                    raise InputDataError(
                        f"{self.path}, line {number}: {len(fields)} fields, not {len(columns)}"
                    )
                accession, split = fields[accession_column], fields[split_column]
                if not is_split_name(split):
                    raise InputDataError(
                        f"{self.path}, line {number}: a split cannot be called {split!r:.80}; "
                        "use small letters, digits and _"
                    )
                name = names.setdefault(split, split)
                if splits.setdefault(accession, name) != name:
                    raise InputDataError(
                        f"{self.path}, line {number}: {accession} is in {splits[accession]} and "
                        f"in {split}; a sequence has one split"
                    )
        return splits
