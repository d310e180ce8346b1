"""Out-of-distribution splits by protein family: whole families are held out."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, final

from protlm.data.records import Record
from protlm.data.records.record import entry_of
from protlm.data.tables import excerpt, read_rows
from protlm.system.errors import InputDataError
from protlm.system.paths import sha256_of

from .split import HOMOLOG, TRAIN, SplitRule

OOD_FAMILY = "test_ood_family"
# The families that the Performer paper (arXiv 2009.14794) held out of TrEMBL.
PAPER_FAMILIES = (
    *("PF18369", "PF04680", "PF17988", "PF12325", "PF03272", "PF03938", "PF17724", "PF10696"),
    *("PF11968", "PF04153", "PF06173", "PF12378", "PF04420", "PF10841", "PF06917", "PF03492"),
    *("PF06905", "PF15340", "PF17055", "PF05318"),
)

_NOTE = "of the held-out family {}"
# What is between the names of a cell, such as "ATP binding [GO:0005524]; PF00069.28".
_BETWEEN = re.compile(r"[;,\[\]]|(?<=\bPF\d{5})\.\d+")
_PFAM = re.compile(r"PF\d{5}")
# "PF00069;PF07714;" as UniProt writes it, or one family, perhaps with its version.
_FAMILIES = re.compile(r"(?:PF\d{5}(?:\.\d+)?(?:; ?|$))*")
# Headers of the tables from uniprot.org, InterPro's Pfam releases and users.
_ENTRY_COLUMNS = ("entry", "accession", "pfamseq_acc", "uniprot_acc")


@final
class HeldOutFamilies:
    """The entries of the held-out families; other entries of the table are not stored.

    Args:
        table: tab-separated, plain or gzip: with a header that names `Entry`, as uniprot.org
            exports it, or `pfamseq_acc`, as Pfam does; or without a header, accession and family.
        families: words of any column: accessions, or names such as "Globin family".

    `rows_by_column` counts the rows that have one of the words, by the column that has it.
    """

    def __init__(self, table: Path, families: Sequence[str] = PAPER_FAMILIES) -> None:
        self.table, self.families = table, tuple(sorted(set(families)))
        self.rows_by_column = Counter[str]()
        self._families_of: dict[str, tuple[str, ...]] = {}
        # Few lines have a wanted family; this keeps the cost of the others low.
        is_likely = re.compile("|".join(map(re.escape, self.families))).search
        columns: list[str] = []
        for entry, columns, row in _entries(table):
            for column, cell in zip(columns, row, strict=True) if is_likely("\t".join(row)) else ():
                named = [name.strip() for name in _BETWEEN.split(cell)]
                words = {cell, *named, *(word for name in named for word in name.split())}
                if held_out := words.intersection(self.families):
                    self.rows_by_column[column] += 1
                    name = entry_of(entry)
                    known = self._families_of.get(name, ())
                    self._families_of[name] = tuple(sorted({*known, *held_out}))
        present = {family for members in self._families_of.values() for family in members}
        if not present:
            raise InputDataError(
                f"{table} has no entry of {', '.join(self.families)} in its columns "
                f"{', '.join(columns)!r:.200}: it must be a table of the sources, and the families "
                "must be words of it"
            )
        self.absent = tuple(family for family in self.families if family not in present)

    def families_of(self, identifier: str) -> tuple[str, ...]:
        """Returns the held-out families of a record; isoforms belong to those of their entry."""
        return self._families_of.get(entry_of(identifier), ())

    def describe(self) -> dict[str, Any]:
        return {
            "families": list(self.families),
            "absent_from_table": list(self.absent),
            "table": self.table.name,
            "sha256": sha256_of(self.table),
        }


@final
class FamilySplit(SplitRule):
    """A split rule that sends held-out families to `test_ood_family`."""

    def __init__(self, families: HeldOutFamilies, otherwise: SplitRule) -> None:
        self._families, self._otherwise = families, otherwise

    def split_of(self, record: Record, digest: bytes) -> str | None:
        if self._families.families_of(record.identifier):
            return OOD_FAMILY
        return self._otherwise.split_of(record, digest)

    def notes_of(self, record: Record, split: str) -> Iterable[str]:
        families = self._families.families_of(record.identifier) if split == OOD_FAMILY else ()
        if families:
            return [_NOTE.format(family) for family in families]
        return self._otherwise.notes_of(record, split)

    def describe(self) -> dict[str, Any]:
        by = "Pfam family" if all(map(_PFAM.fullmatch, self._families.families)) else "family"
        return {"by": by, **self._families.describe(), "otherwise": self._otherwise.describe()}


@final
class WithoutHomologs(SplitRule):
    """A split rule that leaves training sequences out that are too close to a held-out one.

    Args:
        homologs: a file of their digests, in hexadecimal.
        version: of MMseqs2, which found them.
    """

    def __init__(self, rule: SplitRule, homologs: Path, version: str) -> None:
        self._rule = rule
        self._facts = {"homologs": homologs.name, "sha256": sha256_of(homologs), "mmseqs2": version}
        self._digests = frozenset(map(bytes.fromhex, homologs.read_text("ascii").split()))

    def split_of(self, record: Record, digest: bytes) -> str | None:
        split = self._rule.split_of(record, digest)
        return HOMOLOG if split == TRAIN and digest in self._digests else split

    def notes_of(self, record: Record, split: str) -> Iterable[str]:
        return self._rule.notes_of(record, split)

    def describe(self) -> dict[str, Any]:
        return {**self._rule.describe(), "left_out": self._facts}


def families_without_records(rule: dict[str, Any], noted: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the held-out families without any record."""
    return tuple(family for family in rule.get("families", ()) if _NOTE.format(family) not in noted)


def refuse_empty_hold_out(rule: dict[str, Any], noted: Mapping[str, int]) -> None:
    """Rejects a data set whose held-out families have no record."""
    absent = families_without_records(rule, noted)
    if absent and len(absent) == len(rule["families"]):
        raise InputDataError(
            f"no record belongs to a held-out family ({', '.join(absent)}): the accessions in "
            f"{rule['table']} must be those of the sources; start over with another table or other "
            "families",
            {"restart": True},
        )


def _entries(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields the accession, the columns and the fields of each row."""
    rows = read_rows(path, "a family table")
    number, fields = next(rows)
    columns = [field.strip() for field in fields]
    names = [column.lower() for column in columns]
    entry = next((names.index(name) for name in _ENTRY_COLUMNS if name in names), None)
    if entry is None and len(fields) == 2 and fields[0] and _FAMILIES.fullmatch(fields[1]):
        columns, entry, rows = ["accession", "family"], 0, chain([(number, fields)], rows)
    if entry is None or len(fields) < 2:
        raise InputDataError(
            f"{path}, line {number}: the columns are {fields!r:.200}; Entry and a column of "
            "families must be among them, as in a TSV of uniprot.org, or an accession and a "
            "PFxxxxx, separated by a tab"
        )
    for number, row in rows:
        if len(row) != len(fields) or not row[entry]:
            raise InputDataError(
                f"{path}, line {number}: {len(row)} fields, not {len(fields)}, or no accession, in "
                f"{excerpt(row)}; fetch the table again"
            )
        yield row[entry], columns, row
