"""The relatives of any number of queries: from one file, a folder of files, or a table."""

import sys
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cached_property
from multiprocessing import parent_process
from pathlib import Path

from protlm.data.families.family import Family
from protlm.data.families.members import MemberTable
from protlm.data.families.reading import (
    Found,
    digest_of,
    family,
    read_family,
    sequences_named,
)
from protlm.data.records.in_memory import SequenceLike, letters_of
from protlm.data.records.record import Names, Record
from protlm.data.records.source import text_lines
from protlm.options.relatives import FamilyOptions
from protlm.system.errors import InputDataError
from protlm.system.paths import existing_file, sha256_of
from protlm.system.terminal import printable

_SUFFIXES = (".a3m", ".a2m", ".sto", ".stk", ".stockholm", ".afa", ".fasta", ".fa", ".faa", ".fas")
_FILE = f"file NAME{', NAME'.join(_SUFFIXES)} (or with .gz)"
_WHAT = "a file, a folder or a table of relatives"


class Relatives:
    """The relatives of one or of many queries, read when they are asked for.

    Args:
        source: a file of one query, as of `read_family`; a folder with one for each query, NAME.a3m
            (or .a2m, .sto, .fasta, ...; plain or .gz); a table of query and member (`MemberTable`),
            with their sequences in `options.whole_relatives`; or sequences, as of `read_family`.
        options: the filters; by default those of the command line.
    """

    def __init__(
        self, source: Path | Iterable[SequenceLike], options: FamilyOptions | None = None
    ) -> None:
        self.source = source if isinstance(source, Path) else [*source]
        self.options, self._has_said = options or FamilyOptions(), False
        # Of several queries: their names here, files or rows of a table, and those asked for.
        self._names, self._files, self._table = None, dict[str, Path](), None
        self._found, self._sequences = dict[str, str | None](), dict[str, str]()
        if not isinstance(source, Path):
            return
        if existing_file(source, _WHAT, or_folder=True).is_dir():
            self._files, num_others = _files_in(source)
            if not self._files:
                raise InputDataError(
                    f"{source} has no {_FILE}; write the relatives of a query there"
                )
            self._about = f"files of families: {len(self._files):,}, other files: {num_others:,}"
            self._names, self._what = Names(self._files, source), _FILE
        elif _is_table(source):
            if self.options.whole_relatives is None:
                raise InputDataError(
                    f"{source} is a table of query and member, without sequences; give the "
                    "sequence file of its members, too",
                    {"whole_relatives": "FASTA"},
                )
            self._table = MemberTable(source)
            self._names, self._what = self._table.names, "row of another protein"

    def check(self, names: Collection[str], *, of_all: bool = False) -> None:
        """Refuses names of queries without relatives, unless these are allowed.

        Names `of_all` queries are refused if none of several has relatives, also if it is allowed.

        It says, once, what was read. Of a table, it reads the sequences of all members at once.
        """
        asked = {*names} - self._found.keys()
        if self._names is None and len(asked) > 1:
            where = self.source if isinstance(self.source, Path) else "the list"
            raise InputDataError(
                f"{where} has the relatives of one query, not of {len(asked):,}; give a folder "
                "with a file for each of them, NAME.a3m, or a table of query and member, "
                "separated by tabs"
            )
        if self._names is None or not asked:
            return
        found = {name: self._names.find(name) for name in names if name in asked}
        known = [one for one in found.values() if one is not None]
        missing = [name for name, one in found.items() if one is None]
        is_lost = of_all and len(found) > 1 and not any({**self._found, **found}.values())
        if missing and (is_lost or not self.options.allow_none):
            advice = "leave them out, or use such queries alone" if all(missing) else "name a file"
            what = self._what.split()[0]
            raise InputDataError(
                f"{self.source} has no {self._what} for {len(missing):,} of {len(found):,} "
                f"queries, the first of them {missing[0] or '(without a name)'} (names there are "
                f"like {self._names.example}); "
                + (f"name each {what} as its query, or omit the relatives" if is_lost else advice),
                None if is_lost or not all(missing) else {"allow_none": True},
            )
        self._found |= found
        path = self.options.whole_relatives
        if self._table is not None and path is not None:
            members = {member for name in known for member in self._table.members(name)}
            sequences, number = sequences_named(path, members)
            if members and not sequences:
                raise InputDataError(
                    f"{path} has none of the {len(members):,} members of {self.source}, the first "
                    f"of them {min(members)}; give the file from which the table was made"
                )
            self._sequences |= sequences
            read = f"{len(sequences):,} of {len(members):,} members in {number:,} records"
            self._about = f"{self._table}; {read} of {path}"
        self._say(
            f"{self.source}: a {self._what.split()[0]} for {len(known):,} of {len(found):,} queries"
            f"{', the others are read alone' * bool(missing)}; {self._about}"
        )

    def of(self, name: str, residues: str) -> Family:
        """Returns the family of a query, by its name and its residues in capitals ("": unknown).

        A query without a file or a row has no relatives, if this is allowed.
        """
        if self._names is None:
            made = read_family(self.source, residues, name, self.options)
            self._say(str(made))
            return made
        self.check([name])
        known = self._found[name]
        if known is None:
            return Family(residues, name, (), "", {}, f"{self.source}: no {self._what}")
        if self._table is None:
            return read_family(self._files[known], residues, name, self.options)
        members = self._table.members(known)
        here = {one: self._sequences[one] for one in members if one in self._sequences}
        found = Found(
            f"{self.source}, {self.options.whole_relatives}",
            digest_of(here.values()),
            [Record(one, one, sequence, 0) for one, sequence in here.items()],
            False,
            Counter({"without a sequence in the file": len(members) - len(here)}),
            {one: value for one, value in members.items() if value is not None},
        )
        # These are whole proteins already.
        return family(found, residues, name, replace(self.options, whole_relatives=None))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all files and their names, or of the sorted sequences of a list."""
        if not isinstance(self.source, Path):
            return digest_of(map(letters_of, self.source))
        files = [*self.source.iterdir()] if self.source.is_dir() else [self.source]
        files += filter(None, [self.options.whole_relatives])
        return digest_of(f"{one.name} {sha256_of(one)}" for one in files if one.is_file())

    def _say(self, what: str) -> None:
        """Prints what was read, once, and not in the processes that divide the work."""
        if not self._has_said and parent_process() is None:
            print(printable(what), file=sys.stderr)
        self._has_said = True


def _files_in(folder: Path) -> tuple[dict[str, Path], int]:
    """Returns the files of a folder by the names of queries, and the number of others."""
    files, num_others = dict[str, Path](), 0
    for file in sorted(folder.iterdir()):
        name = Path(file.name.removesuffix(".gz"))
        if name.suffix.lower() not in _SUFFIXES:
            num_others += 1
        elif (other := files.setdefault(name.stem, file)) != file:
            raise InputDataError(
                f"{folder} has {other.name} and {file.name}; leave one file for each query"
            )
    return files, num_others


def _is_table(path: Path) -> bool:
    """Returns whether the first line of a file, except comments, has a tab and no header."""
    lines = (line for line in text_lines(path, _WHAT) if line.strip())
    first = next((one for one in lines if one[0] != "#" or one.startswith("# STOCKHOLM")), "")
    return "\t" in first and not first.startswith((">", "#"))
