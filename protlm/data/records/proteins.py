"""The proteins of sequence files: every record is yielded or reported."""

import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import parent_process
from pathlib import Path
from typing import IO

from protlm.data.records.file import read_records
from protlm.data.records.format_detection import WITHOUT_GAPS
from protlm.data.records.record import GAP, Record, Tally
from protlm.data.records.source import STANDARD_INPUT
from protlm.options.shared import Duplicates
from protlm.system.errors import InputDataError
from protlm.system.paths import existing_file, scratch_name
from protlm.system.terminal import printable

_MOST_LISTED = 20
_REPEATED = "repeated at line"
_FIRST_WORD = (
    "an identifier is the first word of a header, and with duplicates=header the whole header"
)


def _spooled_input() -> IO[bytes]:
    """Copies standard input to a temporary file, since the records are read more than once."""
    if sys.stdin is None:
        raise InputDataError("standard input is closed; give the path of a sequence file")
    spool = tempfile.NamedTemporaryFile(**scratch_name("protlm-standard-input"))  # noqa: SIM115
    shutil.copyfileobj(sys.stdin.buffer, spool)
    spool.flush()
    return spool


@dataclass
class Proteins:
    """The records of sequence files, which are checked once and can then be read repeatedly.

    The path `-` is standard input. Identifiers are unique over all files. Records that are longer
    than `max_residues`, or for whose length `refuse` returns a reason, are skipped and reported.
    While the files are checked, `observe` is called with each record that is kept. `renamed` maps
    the new names of records to their identifiers.
    """

    path: Path | Sequence[Path]
    max_residues: int | None = None
    duplicates: Duplicates = Duplicates.error
    observe: Callable[[Record], None] | None = None
    refuse: Callable[[int], str | None] = lambda _: None
    skipped: list[tuple[str, str]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    renamed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        paths = [self.path] if isinstance(self.path, Path) else self.path
        # The free memory changes, and the files are read again.
        self.refuse = cache(self.refuse)
        self._spool = _spooled_input() if STANDARD_INPUT in paths else None
        copy = Path(self._spool.name) if self._spool is not None else STANDARD_INPUT
        # The name of each file in messages, and what is read.
        self._files = [
            ("standard input", copy) if path == STANDARD_INPUT else (str(path), path)
            for path in paths
        ]
        for _, source in self._files:
            existing_file(source, "a sequence file")
        for record in self._records(self.skipped, self.tally):
            self.lengths.append(len(record.sequence))
            if self.observe is not None:
                self.observe(record)
        # The observer may refer to this object.
        self.observe = None
        gaps = f"; remove gaps: {WITHOUT_GAPS}" if GAP in self.tally.rejected else ""
        if not self.lengths:
            identifier, reason = self.without_entry()[0]
            raise InputDataError(
                f"{self.name}: none of the {self.num_records:,} records can be used, the first of "
                f"them {identifier}: {reason}{gaps}"
            )
        # Only once, not in the processes that divide the work.
        if gaps and parent_process() is None:
            # Of the caller: the frame between is that of the generated `__init__`.
            warnings.warn(
                f"{self.name}: {self.tally.rejected[GAP]:,} of {self.num_records:,} records have "
                f"gaps and are left out{gaps}",
                stacklevel=3,
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Record]:
        return self._records([], Tally())

    @property
    def name(self) -> str:
        """The file or the files, in messages."""
        more = f" and {len(self._files) - 1} more" if len(self._files) > 1 else ""
        return f"{self._files[0][0]}{more}"

    @property
    def num_records(self) -> int:
        """Number of records in the file: those yielded, skipped, and rejected by the reader."""
        return len(self) + len(self.skipped) + self.tally.num_rejected

    def without_entry(self) -> list[tuple[str, str]]:
        """Returns the identifier and the reason of every record that is not yielded.

        The reader lists the first 1,000 records of each reason; a row without an identifier counts
        the others.
        """
        rows = []
        for reason, number in sorted(self.tally.rejected.items()):
            listed = self.tally.listed.get(reason, [])
            rows += [
                (identifier, f"{reason}, {f'{file}, ' if len(self._files) > 1 else ''}line {line}")
                for identifier, file, line in listed
            ]
            if number > len(listed):
                rows.append(("", f"{reason}: {number - len(listed):,} more records"))
        return [*rows, *self.skipped]

    def report(self, done: str, *, further: Sequence[tuple[str, str]] = ()) -> None:
        """Prints on standard error how many records were used, changed and skipped."""
        used = len(self) - len(further)
        out = self.num_records - used
        of = f" of {len(self._files)} files" if len(self._files) > 1 else ""
        word = "record" if self.num_records == 1 else "records"
        print(f"{self.num_records:,} {word}{of}: {used:,} {done}, {out:,} skipped", file=sys.stderr)
        for label, found in (("rejected", self.tally.rejected), ("changed", self.tally.changed)):
            if found:
                listed = ", ".join(f"{n} {reason}" for reason, n in sorted(found.items()))
                print(f"{label}: {listed}", file=sys.stderr)
        for identifier, reason in [*self.without_entry(), *further][:_MOST_LISTED]:
            print(printable(f"skipped {identifier}: {reason}"), file=sys.stderr)
        if out > _MOST_LISTED:
            print(f"and {out - _MOST_LISTED:,} more", file=sys.stderr)
        if repeated := sum(reason.startswith(_REPEATED) for _, reason in self.skipped):
            print(
                f"records with the identifier of an earlier one: {repeated:,}; {_FIRST_WORD}",
                file=sys.stderr,
            )

    def _too_long(self, length: int) -> str | None:
        if self.max_residues is not None and length > self.max_residues:
            return f"{length:,} residues; this model takes {self.max_residues:,}"
        return self.refuse(length)

    def _records(self, skipped: list[tuple[str, str]], tally: Tally) -> Iterator[Record]:
        seen: Counter[str] = Counter()
        # Hashes of the sequences of identifiers that may be repeated.
        hashes: dict[str, int] = {}
        for file, record in self._read(tally):
            seen[record.identifier] += 1
            count = seen[record.identifier]
            is_first, hashed = self.duplicates is Duplicates.first, hash(record.sequence)
            is_other = is_first and hashes.setdefault(record.identifier, hashed) != hashed
            if reason := self._too_long(len(record.sequence)):
                skipped.append((record.identifier, reason))
            elif count == 1:
                yield record
            elif self.duplicates is Duplicates.suffix:
                while seen[f"{record.identifier}_{count}"]:
                    count += 1
                name = f"{record.identifier}_{count}"
                seen[name] += 1
                self.renamed[name] = record.identifier
                yield record._replace(identifier=name)
            elif is_first:
                of = f" of {file}" if len(self._files) > 1 else ""
                other = " with another sequence" if is_other else ""
                skipped.append((record.identifier, f"{_REPEATED} {record.line}{of}{other}"))
            else:
                is_whole = self.duplicates is Duplicates.header
                instead = "suffix" if is_whole else "suffix, first or header"
                where, same = next(
                    one for one in self._read(Tally()) if one[1].identifier == record.identifier
                )
                raise InputDataError(
                    f"{file}, line {record.line}: the identifier {record.identifier} is "
                    f"repeated (it is in {where}, line {same.line})"
                    f"{'' if is_whole else f'; {_FIRST_WORD}'}",
                    {"duplicates": instead},
                )

    def _read(self, tally: Tally) -> Iterator[tuple[str, Record]]:
        for name, source in self._files:
            for record in read_records(source, tally, name=name):
                if self.duplicates is Duplicates.header and record.header.strip():
                    self.renamed[record.header] = record.identifier
                    yield name, record._replace(identifier=record.header)
                else:
                    yield name, record


def one_protein(
    path: Path, otherwise: str = "; give a file of one protein, the wild type"
) -> Record:
    """Returns the record of a file of one protein, such as a wild type."""
    proteins = Proteins(path, duplicates=Duplicates.suffix)
    if proteins.num_records != 1:
        raise InputDataError(f"{proteins.name} has {proteins.num_records:,} proteins{otherwise}")
    for changed in proteins.tally.changed:
        print(f"{proteins.name}: {changed}", file=sys.stderr)
    return next(iter(proteins))
