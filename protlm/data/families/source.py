"""The relatives of any number of queries: from one file, a folder of files, or a table."""

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import ClassVar, final

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
from protlm.data.records.in_memory import SequenceLike
from protlm.data.records.record import Names
from protlm.data.records.source import text_lines
from protlm.options.relatives import FamilyOptions
from protlm.system.errors import InputDataError
from protlm.system.paths import existing_file
from protlm.system.terminal import printable

_SUFFIXES = {".a3m", ".a2m", ".sto", ".stk", ".stockholm", ".afa", ".fasta", ".fa", ".faa", ".fas"}
_WHAT = "a file, a folder or a table of relatives"


class _Source(ABC):
    """What relatives come from, and the options of their filters."""

    def __init__(self, where: str, options: FamilyOptions) -> None:
        self.where, self.options = where, options

    @abstractmethod
    def check(self, names: Sequence[str]) -> str:
        """Refuses queries without relatives; returns what to say of the others, or ""."""

    @abstractmethod
    def of(self, name: str, residues: str) -> Family:
        """Returns the family of a query."""


class _OneFamily(_Source):
    """A file, or a list of sequences, of one query."""

    def __init__(self, source: Path | Sequence[SequenceLike], options: FamilyOptions) -> None:
        super().__init__(str(source) if isinstance(source, Path) else "the list", options)
        self._source = source

    def check(self, names: Sequence[str]) -> str:
        if len(names) > 1:
            raise InputDataError(
                f"{self.where} has the relatives of one query, not of {len(names):,}; give a "
                "folder with a file for each of them, NAME.a3m, or a table of query and member"
            )
        return ""

    def of(self, name: str, residues: str) -> Family:
        if isinstance(self._source, Path):
            return read_family(self._source, residues, name, self.options)
        return family_of(self._source, residues, name, self.options)


class _Families(_Source):
    """A folder or a table, with the relatives of many queries."""

    # What it has for a query.
    what: ClassVar[str]

    def __init__(self, path: Path, names: Iterable[str], options: FamilyOptions) -> None:
        super().__init__(str(path), options)
        self.names = Names(names, path)

    def find(self, name: str) -> str | None:
        """Returns the name of a query as it is there, or None."""
        return self.names.find(name)

    @abstractmethod
    def expect(self, names: Sequence[str]) -> str:
        """Reads what these names have in common; returns what it is."""

    @abstractmethod
    def read(self, known: str, name: str, residues: str) -> Family:
        """Returns the family of a query whose name is known here."""

    def check(self, names: Sequence[str]) -> str:
        known = {name: found for name in names if (found := self.find(name)) is not None}
        missing = [name for name in names if name not in known]
        if missing and not self.options.allow_none:
            raise InputDataError(
                f"{self.where} has no {self.what} for {len(missing):,} of {len(names):,} queries, "
                f"the first of them {missing[0]}; leave them out, or use such queries alone",
                {"allow_none": True},
            )
        of = f"relatives of {len(known):,} of {len(names):,} queries"
        return f"{self.where}: {of}; {self.expect([*known.values()])}"

    def of(self, name: str, residues: str) -> Family:
        if (known := self.find(name)) is not None:
            return self.read(known, name, residues)
        self.check([name])
        return Family(residues, name, (), "", {}, f"{self.where}: no {self.what}")


class _Folder(_Families):
    """A folder with a file for each query."""

    what = f"file NAME{', '.join(sorted(_SUFFIXES))} (or with .gz)"

    def __init__(self, path: Path, options: FamilyOptions) -> None:
        self._files, self._num_others = dict[str, Path](), 0
        for file in sorted(path.iterdir()):
            name = Path(file.name.removesuffix(".gz"))
            if name.suffix.lower() not in _SUFFIXES:
                self._num_others += 1
            elif (other := self._files.setdefault(name.stem, file)) != file:
                raise InputDataError(
                    f"{path} has {other.name} and {file.name}; leave one file for each query"
                )
        super().__init__(path, self._files, options)

    def expect(self, names: Sequence[str]) -> str:
        return f"{len(self._files):,} files of families, {self._num_others:,} others in the folder"

    def read(self, known: str, name: str, residues: str) -> Family:
        return read_family(self._files[known], residues, name, self.options)


class _Table(_Families):
    """A table of query and member, and a file of sequences."""

    what = "row"

    def __init__(self, path: Path, options: FamilyOptions) -> None:
        if options.whole_relatives is None:
            raise InputDataError(
                f"{path} is a table of query and member, without sequences; give the sequence file "
                "of its members, too",
                {"whole_relatives": "FASTA"},
            )
        self._table, self._path = MemberTable(path), options.whole_relatives
        self._expected, self._sequences = set[str](), dict[str, str]()
        super().__init__(path, (), options)

    def find(self, name: str) -> str | None:
        return self._table.find(name)

    def expect(self, names: Sequence[str]) -> str:
        members = {member for name in names for member in self._table.members(name)}
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
        return family(
            Found(
                f"{self.where}, {self._path}",
                digest_of(record.sequence for record in records),
                records,
                False,
                Counter({f"not in {self._path.name}": missing} if missing else {}),
                {one: value for one, value in members.items() if value is not None},
            ),
            residues,
            name,
            self.options,
        )


@final
class Relatives:
    """The relatives of queries, read when they are asked for.

    Args:
        source: a file of one query, as of `read_family`; a folder with one for each query, NAME.a3m
            (or .a2m, .sto, .fasta, ...; plain or .gz); a table of query and member (`MemberTable`),
            with their sequences in `options.whole_relatives`; or sequences, as of `family_of`.
        options: the filters; by default those of the command line.
    """

    def __init__(
        self, source: Path | Iterable[SequenceLike], options: FamilyOptions | None = None
    ) -> None:
        options = options or FamilyOptions()
        if not isinstance(source, Path):
            self._source: _Source = _OneFamily([*source], options)
        elif existing_file(source, _WHAT, or_folder=True).is_dir():
            self._source = _Folder(source, options)
        else:
            kind = _Table if _is_table(source) else _OneFamily
            self._source = kind(source, options)
        self._said: str = ""
        self._last: Family | None = None

    def check(self, names: Collection[str]) -> None:
        """Refuses names of queries without relatives, unless these are allowed.

        It says once what was read. Of a table, it reads the sequences of all members at once.
        """
        self._say(self._source.check(list(dict.fromkeys(names))))

    def of(self, name: str, residues: str) -> Family:
        """Returns the family of a query, by its name and its residues in capitals.

        A query without a file or a row has no relatives, if this is allowed.
        """
        last = self._last
        if last is None or (last.name, last.query) != (name, residues):
            if not self._said:
                self.check([name])
            last = self._last = self._source.of(name, residues)
            self._say(str(last))
        return last

    def _say(self, what: str) -> None:
        if what and not self._said:
            print(printable(what), file=sys.stderr)
            self._said = what


def _is_table(path: Path) -> bool:
    """Returns whether the first line of a file, except comments, has a tab and no header."""
    for line in text_lines(path, _WHAT):
        if line.startswith(("# STOCKHOLM", ">")):
            return False
        if line.strip() and not line.startswith("#"):
            return "\t" in line
    return False
