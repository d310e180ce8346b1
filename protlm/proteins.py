"""The proteins a command reads from a sequence file: every record is yielded or reported."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from protlm.data.records import Record, Tally, read_records
from protlm.errors import InputDataError
from protlm.paths import existing_file


class Duplicates(StrEnum):
    """What happens to a record whose identifier came before."""

    error = "error"
    first = "first"
    suffix = "suffix"


@dataclass
class Proteins:
    """A sequence file, surveyed once and then read as often as needed.

    Args:
        path: FASTA, Swiss-Prot flat file or UniProt XML, plain or gzip.
        max_residues: longer records are skipped and reported; None takes all.
        duplicates: a repeated identifier is an error, skipped, or gets a suffix `_2`.
    """

    path: Path
    max_residues: int | None = None
    duplicates: Duplicates = Duplicates.error
    skipped: list[tuple[str, str]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        existing_file(self.path, "a sequence file")
        self.skipped, self.tally = [], Tally()
        self.lengths = [len(record.sequence) for record in self._records(self.skipped, self.tally)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Record]:
        return self._records([], Tally())

    @property
    def num_records(self) -> int:
        """Records in the file: those yielded, skipped, and rejected by the reader."""
        return len(self) + len(self.skipped) + self.tally.num_rejected

    def report(self, done: str) -> None:
        """Says on standard error what became of every record."""
        rejected = [f"{n} {reason}" for reason, n in sorted(self.tally.rejected.items())]
        changed = [f"{n} {reason}" for reason, n in sorted(self.tally.changed.items())]
        out = self.num_records - len(self)
        print(f"{self.num_records} records: {len(self)} {done}, {out} skipped", file=sys.stderr)
        for label, parts in (("rejected", rejected), ("changed", changed)):
            if parts:
                print(f"{label}: {', '.join(parts)}", file=sys.stderr)
        named = [
            (identifier, f"{reason}, line {line}")
            for reason, records in sorted(self.tally.listed.items())
            for identifier, _, line in records
        ]
        for identifier, reason in [*named, *self.skipped]:
            print(f"skipped {identifier}: {reason}", file=sys.stderr)

    def _records(self, skipped: list[tuple[str, str]], tally: Tally) -> Iterator[Record]:
        seen: Counter[str] = Counter()
        for record in read_records(self.path, tally):
            seen[record.identifier] += 1
            count = seen[record.identifier]
            if self.max_residues is not None and len(record.sequence) > self.max_residues:
                reason = f"{len(record.sequence):,} residues; this model takes"
                skipped.append((record.identifier, f"{reason} {self.max_residues:,}"))
            elif count == 1:
                yield record
            elif self.duplicates is Duplicates.suffix:
                while seen[f"{record.identifier}_{count}"]:
                    count += 1
                name = f"{record.identifier}_{count}"
                seen[name] += 1
                yield record._replace(identifier=name)
            elif self.duplicates is Duplicates.first:
                skipped.append((record.identifier, f"repeated at line {record.line}"))
            else:
                raise InputDataError(
                    f"{self.path}, line {record.line}: the identifier {record.identifier} came "
                    "before; type --duplicates first or --duplicates suffix"
                )
