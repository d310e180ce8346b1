"""The relatives of any number of queries: from one file, a folder of files, or a table."""

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from protlm.data.families.family import Family
from protlm.data.families.members import MemberTable
from protlm.data.families.reading import (
    Found,
    digest_of,
    family,
    family_of,
    read_family,
    sequences_named,
)
from protlm.data.records import Record
from protlm.data.records.in_memory import SequenceLike, letters_of
from protlm.data.records.record import Names
from protlm.data.records.source import text_lines
from protlm.options.relatives import FamilyOptions
from protlm.system.errors import InputDataError
from protlm.system.paths import existing_file, sha256_of
from protlm.system.terminal import printable

_SUFFIXES = (".a3m", ".a2m", ".sto", ".stk", ".stockholm", ".afa", ".fasta", ".fa", ".faa", ".fas")
_WHAT = "a file, a folder or a table of relatives"


class Relatives:
    """The relatives of queries, read when they are asked for: here those of one query.

    Args:
        source: a file, as of `read_family`, or sequences of a program, as of `family_of`.
        options: the filters.
    """

    def __init__(self, source: Path | Sequence[SequenceLike], options: FamilyOptions) -> None:
        self.source, self.options, self._has_said = source, options, False

    def check(self, names: Collection[str]) -> None:
        """Refuses names of queries without relatives, unless these are allowed.

        It says on standard error, once, what was read. Of a table, it reads the sequences of all
        members at once.
        """
        if len({*names}) > 1:
            where = self.source if isinstance(self.source, Path) else "the list"
            raise InputDataError(
                f"{where} has the relatives of one query, not of {len({*names}):,}; give a folder "
                "with a file for each of them, NAME.a3m, or a table of query and member"
            )

    def of(self, name: str, residues: str) -> Family:
        """Returns the family of a query, by its name and its residues in capitals ("": unknown).

        A query without a file or a row has no relatives, if this is allowed.
        """
        if isinstance(self.source, Path):
            found = read_family(self.source, residues, name, self.options)
        else:
            found = family_of(self.source, residues, name, self.options)
        self.say(str(found))
        return found

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all files and their names, or of the sorted sequences of a list."""
        if not isinstance(self.source, Path):
            return digest_of(map(letters_of, self.source))
        files = [*self.source.iterdir()] if self.source.is_dir() else [self.source]
        files += filter(None, [self.options.whole_relatives])
        return digest_of(f"{one.name} {sha256_of(one)}" for one in files if one.is_file())

    def say(self, what: str) -> None:
        """Prints what was read, once."""
        if not self._has_said:
            print(printable(what), file=sys.stderr)
        self._has_said = True


class _Many(Relatives, ABC):
    """The relatives of many queries, by their names."""

    # What there is for a query.
    what: ClassVar[str]
    source: Path
    names: Names

    @abstractmethod
    def expect(self, known: Sequence[str]) -> str:
        """Reads what these names have in common; returns what was read."""

    @abstractmethod
    def read(self, known: str, name: str, residues: str) -> Family:
        """Returns the family of a query whose name is known here."""

    def check(self, names: Collection[str]) -> None:
        known = {name: found for name in names if (found := self.names.find(name)) is not None}
        missing = [name for name in names if name not in known]
        if missing and not self.options.allow_none:
            raise InputDataError(
                f"{self.source} has no {self.what} for {len(missing):,} of {len(names):,} queries, "
                f"the first of them {missing[0]}; leave them out, or use such queries alone",
                {"allow_none": True},
            )
        of = f"relatives of {len(known):,} of {len(names):,} queries"
        self.say(f"{self.source}: {of}; {self.expect([*known.values()])}")

    def of(self, name: str, residues: str) -> Family:
        known = self.names.find(name)
        if known is None or not self._has_said:
            self.check([name])
        if known is not None:
            return self.read(known, name, residues)
        return Family(residues, name, (), "", {}, f"{self.source}: no {self.what}")


class _Folder(_Many):
    """A folder with a file for each query."""

    what = f"file NAME{', NAME'.join(_SUFFIXES)} (or with .gz)"

    def __init__(self, source: Path, options: FamilyOptions) -> None:
        super().__init__(source, options)
        self._files, self._num_others = dict[str, Path](), 0
        for file in sorted(source.iterdir()):
            name = Path(file.name.removesuffix(".gz"))
            if name.suffix.lower() not in _SUFFIXES:
                self._num_others += 1
            elif (other := self._files.setdefault(name.stem, file)) != file:
                raise InputDataError(
                    f"{source} has {other.name} and {file.name}; leave one file for each query"
                )
        self.names = Names(self._files, source)

    def expect(self, known: Sequence[str]) -> str:
        return f"{len(self._files):,} files of families, {self._num_others:,} others in the folder"

    def read(self, known: str, name: str, residues: str) -> Family:
        return read_family(self._files[known], residues, name, self.options)


class _Table(_Many):
    """A table of query and member, and a file of sequences."""

    what = "row"

    def __init__(self, source: Path, options: FamilyOptions) -> None:
        super().__init__(source, options)
        if options.whole_relatives is None:
            raise InputDataError(
                f"{source} is a table of query and member, without sequences; give the sequence "
                "file of its members, too",
                {"whole_relatives": "FASTA"},
            )
        self._path, self._table = options.whole_relatives, MemberTable(source)
        self.names = self._table.names
        self._expected, self._sequences = set[str](), dict[str, str]()

    def expect(self, known: Sequence[str]) -> str:
        members = {member for name in known for member in self._table.members(name)}
        sequences, number = sequences_named(self._path, members)
        self._expected |= members
        self._sequences |= sequences
        found = f"{len(sequences):,} of {len(members):,} members in {number:,} records"
        return f"{self._table}; {found} of {self._path}"

    def read(self, known: str, name: str, residues: str) -> Family:
        members = self._table.members(known)
        if not self._expected.issuperset(members):
            self.expect([known])
        records = [
            Record(one, one, self._sequences[one], 0) for one in members if one in self._sequences
        ]
        missing = len(members) - len(records)
        found = Found(
            f"{self.source}, {self._path}",
            digest_of(record.sequence for record in records),
            records,
            False,
            Counter({f"not in {self._path.name}": missing} if missing else {}),
            {one: value for one, value in members.items() if value is not None},
        )
        # These are whole proteins already.
        return family(found, residues, name, replace(self.options, whole_relatives=None))


def relatives_of(
    source: Path | Iterable[SequenceLike], options: FamilyOptions | None = None
) -> Relatives:
    """Returns the relatives of one or of many queries, from what people have.

    Args:
        source: a file of one query, as of `read_family`; a folder with one for each query, NAME.a3m
            (or .a2m, .sto, .fasta, ...; plain or .gz); a table of query and member (`MemberTable`),
            with their sequences in `options.whole_relatives`; or sequences, as of `family_of`.
        options: the filters; by default those of the command line.
    """
    options = options or FamilyOptions()
    if not isinstance(source, Path):
        return Relatives([*source], options)
    if existing_file(source, _WHAT, or_folder=True).is_dir():
        return _Folder(source, options)
    return (_Table if _is_table(source) else Relatives)(source, options)


def _is_table(path: Path) -> bool:
    """Returns whether the first line of a file, except comments, has a tab and no header."""
    for line in text_lines(path, _WHAT):
        if line.startswith(("# STOCKHOLM", ">")):
            return False
        if line.strip() and not line.startswith("#"):
            return "\t" in line
    return False
