"""Out-of-distribution splits by protein family: whole Pfam families are held out."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from protlm.data.records import Record
from protlm.data.tables import excerpt, read_rows
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import sha256_of

from .split import SplitRule

OOD_FAMILY = "test_ood_family"
# The families that the Performer paper (arXiv 2009.14794) held out of TrEMBL.
PAPER_FAMILIES = (
    *("PF18369", "PF04680", "PF17988", "PF12325", "PF03272", "PF03938", "PF17724", "PF10696"),
    *("PF11968", "PF04153", "PF06173", "PF12378", "PF04420", "PF10841", "PF06917", "PF03492"),
    *("PF06905", "PF15340", "PF17055", "PF05318"),
)

_BY = "Pfam family"
_NOTE = "of the held-out family {}"
_FAMILY = re.compile(r"PF\d{5}")
# "PF00069;PF07714;" as UniProt writes it, or one family, perhaps with its version.
_FAMILIES = re.compile(r"(?:PF\d{5}(?:\.\d+)?(?:; ?|$))*")
# A UniProt accession, alone or as the name of a UniRef cluster, with an optional suffix: the number
# of an isoform or of a version.
_ACCESSION = re.compile(
    r"(?:UniRef\d+_)?"
    r"([OPQ]\d[A-Z\d]{3}\d|[A-NR-Z]\d(?:[A-Z][A-Z\d]{2}\d){1,2})"
    r"(?:[-.]\d+)?"
)
# Headers of the tables from uniprot.org, InterPro's Pfam releases and users.
_ENTRY_COLUMNS = ("entry", "accession", "pfamseq_acc", "uniprot_acc")
_FAMILY_COLUMNS = ("pfam", "pfam_acc", "pfama_acc", "family")


def entry_of(identifier: str) -> str:
    """Returns the UniProt entry of an identifier; other identifiers are returned unchanged.

    >>> entry_of("P12345-2"), entry_of("P12345.3"), entry_of("UniRef50_P12345"), entry_of("x-2")
    ('P12345', 'P12345', 'P12345', 'x-2')
    """
    match = _ACCESSION.fullmatch(identifier)
    return match[1] if match else identifier


@final
class HeldOutFamilies:
    """The entries of the held-out families; other entries of the table are not stored.

    Args:
        table: tab-separated, plain or gzip: with a header that names `Entry` and `Pfam`, as
            uniprot.org exports it, `pfamseq_acc` and `pfamA_acc`, as Pfam does, or without a
            header, accession and family.
        families: Pfam accessions.
    """

    def __init__(self, table: Path, families: Sequence[str] = PAPER_FAMILIES) -> None:
        for family in families:
            if not _FAMILY.fullmatch(family):
                raise UserError(
                    f"--ood-families {family} is not a Pfam accession; they look like PF00069"
                )
        self.table, self.families = table, tuple(sorted(set(families)))
        wanted = frozenset(families)
        self._families_of: dict[str, tuple[str, ...]] = {}
        for entry, named in _entries(table):
            # Few lines have a wanted family; this keeps the cost of the others low.
            if held_out := [family for family in _FAMILY.findall(named) if family in wanted]:
                name = entry_of(entry)
                known = self._families_of.get(name, ())
                self._families_of[name] = tuple(sorted({*known, *held_out}))
        found = {family for members in self._families_of.values() for family in members}
        if not found:
            raise InputDataError(
                f"{table} has no entry of {', '.join(self.families)}: it must be a table of the "
                "sources, and the families must be those it names"
            )
        self.absent = tuple(family for family in self.families if family not in found)

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
        otherwise = self._otherwise.describe()
        return {"by": _BY, **self._families.describe(), "otherwise": otherwise}


def families_without_records(rule: dict[str, Any], noted: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the held-out families without any record."""
    families = rule.get("families", ()) if rule.get("by") == _BY else ()
    return tuple(family for family in families if _NOTE.format(family) not in noted)


def refuse_empty_hold_out(rule: dict[str, Any], noted: Mapping[str, int]) -> None:
    """Rejects a data set whose held-out families have no record."""
    absent = families_without_records(rule, noted)
    if absent and len(absent) == len(rule["families"]):
        raise InputDataError(
            f"no record belongs to a held-out family ({', '.join(absent)}): the accessions in "
            f"{rule['table']} must be those of the sources; with another table or other "
            "--ood-families, add --restart"
        )


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the accession and the families, as written, of each line."""
    rows = read_rows(path, "a family table")
    number, fields = next(rows)
    columns = _columns(fields)
    if columns is None:
        raise InputDataError(
            f"{path}, line {number}: the columns are {fields!r:.200}; Entry and Pfam must be among "
            "them, as in a TSV of uniprot.org, or an accession and a PFxxxxx, separated by a tab"
        )
    entry_column, family_column, is_header = columns
    if not is_header:
        yield fields[0], fields[1]
    for row_number, row in rows:
        if len(row) != len(fields):
            raise InputDataError(
                f"{path}, line {row_number}: {len(row)} fields, not {len(fields)}, in "
                f"{excerpt(row)}; fetch the table again"
            )
        entry, families = row[entry_column], row[family_column]
        if not entry or not _FAMILIES.fullmatch(families):
            raise InputDataError(
                f"{path}, line {row_number}: {entry!r:.80} with {families!r:.80} is not an "
                "accession and its Pfam families (PF00069;PF07714;)"
            )
        yield entry, families


def _columns(fields: list[str]) -> tuple[int, int, bool] | None:
    """Returns the columns of accession and families, and whether the line is a header."""
    names = [field.strip().lower() for field in fields]
    entry = next((names.index(name) for name in _ENTRY_COLUMNS if name in names), None)
    family = next((names.index(name) for name in _FAMILY_COLUMNS if name in names), None)
    if entry is not None and family is not None:
        return entry, family, True
    if len(fields) == 2 and fields[0] and _FAMILIES.fullmatch(fields[1]):
        return 0, 1, False
    return None
