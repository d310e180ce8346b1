"""A protein of a sequence file, its residues, options for reading it, and counts of records."""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from protlm.data.vocabulary import RESIDUES, STANDARD
from protlm.options.prepare import ReadOptions
from protlm.system.errors import InputDataError

MAX_LISTED = 1_000
# Identifiers of databases, of which MMseqs2 keeps the accession when it reads FASTA.
_DATABASE = re.compile(r"(?:sp|tr|gb|ref|pdb|bbs|lcl|cl)\|([^|\s]+)")


class Feature(NamedTuple):
    """An annotated part of a protein, as UniProt lists it.

    `kind` is that of the source: `BINDING` in flat files, `binding site` in XML. `first` and `last`
    are positions counted from 0, both included; None where the source has no certain position in
    this sequence: it is unknown, uncertain, beyond the end of a fragment, or `on_isoform`, in the
    sequence of another isoform. `note` is the ligand of a binding site, or a description, or "".
    """

    kind: str
    first: int | None
    last: int | None
    on_isoform: bool = False
    note: str = ""


class Record(NamedTuple):
    """A protein of a sequence file.

    `sequence` consists of the 25 residue letters in upper case; `line` is the line of the record,
    counted from 1. Information that the source lacks is None. `organism` is the name as written in
    the source: the scientific name, in flat files followed by other names in parentheses; `taxon`
    is its NCBI taxon number. `features` are those of flat files and XML, where they were asked for;
    `row` has the letters and gaps of an alignment, where rows were, and if they are not `sequence`.
    """

    identifier: str
    header: str
    sequence: str
    line: int
    taxon: int | None = None
    is_fragment: bool | None = None
    organism: str | None = None
    features: tuple[Feature, ...] | None = None
    row: str | None = None


STRICT = ReadOptions()


@dataclass
class Tally:
    """Counts of records by reason.

    `records` counts all records that were read, `rejected` those that cannot be used, `filtered`
    those that were not selected, `changed` those kept with a change, `noted` those kept unchanged
    but worth reporting. For every reason for rejection, the first `max_listed` records are listed
    as (identifier, name of the file, line).
    """

    records: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    listed: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)
    max_listed: int = field(default=MAX_LISTED, init=False)

    def reject(self, reason: str, identifier: str, file: str, line: int) -> None:
        self.rejected[reason] += 1
        listed = self.listed.setdefault(reason, [])
        if len(listed) < self.max_listed:
            listed.append((identifier, file, line))

    def add(self, other: "Tally") -> None:
        self.records += other.records
        self.rejected.update(other.rejected)
        self.filtered.update(other.filtered)
        self.changed.update(other.changed)
        self.noted.update(other.noted)
        for reason, listed in other.listed.items():
            mine = self.listed.setdefault(reason, [])
            mine += listed[: self.max_listed - len(mine)]

    def warn_of_rejected(self, path: Path) -> None:
        """Warns in one line of the records of a file that cannot be used, if there are any."""
        if self.rejected:
            reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(self.rejected.items()))
            warnings.warn(
                f"{path}: {self.num_rejected:,} of {self.records:,} records rejected: {reasons}",
                stacklevel=2,
            )

    @property
    def num_rejected(self) -> int:
        return self.rejected.total()

    @property
    def num_filtered(self) -> int:
        return self.filtered.total()


MAX_RESIDUES = 100_000
NUL, GAP = "NUL byte", "gap"
SEVERAL = "',' in the sequence: several proteins in one record"
TOO_LONG = f"longer than {MAX_RESIDUES:,} residues"

NUCLEOTIDES = b"ACGTUN"
_NUCLEOTIDES = NUCLEOTIDES.decode()
_STANDARD = STANDARD.encode()
# A UniProt accession, alone or as the name of a UniRef cluster, with an optional suffix: the number
# of an isoform or of a version.
_ENTRY = re.compile(
    r"(?:UniRef\d+_)?"
    r"([OPQ]\d[A-Z\d]{3}\d|[A-NR-Z]\d(?:[A-Z][A-Z\d]{2}\d){1,2})"
    r"(?:[-.]\d+)?"
)
# The residues of its protein that a row of an alignment has, after its name.
RANGE = re.compile(r"/\d+-\d+$")
_RESIDUES = RESIDUES.encode()
_WHITESPACE = b" \t\n\v\f\r\x1c\x1d\x1e\x1f"
_GAPS = b"-.~"
_REASONS = (
    (NUL, b"\0"),
    ("'>' inside a line", b">"),
    (SEVERAL, b","),
    ("'*' inside the sequence", b"*"),
    # Before gaps, for the point of decimals.
    ("digit", b"0123456789"),
    (GAP, _GAPS),
)


def accession(identifier: str) -> str:
    """Returns the accession in an identifier of a database, as MMseqs2 does; or the identifier.

    >>> accession("sp|P12345|AATM_RABIT"), accession("P12345")
    ('P12345', 'P12345')
    """
    match = _DATABASE.match(identifier)
    return match[1] if match else identifier


def entry_of(identifier: str) -> str:
    """Returns the UniProt entry in an identifier, or the identifier, without the range of a row.

    >>> entry_of("P12345-2"), entry_of("P12345.3/1-9"), entry_of("UniRef50_P12345"), entry_of("x-2")
    ('P12345', 'P12345', 'P12345', 'x-2')
    """
    name = accession(RANGE.sub("", identifier))
    match = _ENTRY.fullmatch(name)
    return match[1] if match else name


class Names:
    """Names of proteins, which are found with and without those of databases.

    >>> Names(["sp|P12345|AATM_RABIT"], "x.tsv").find("P12345")
    'sp|P12345|AATM_RABIT'
    """

    def __init__(self, names: Iterable[str], where: object) -> None:
        self._where, self._by_accession = where, dict[str, list[str]]()
        for name in names:
            self._by_accession.setdefault(accession(name), []).append(name)

    @property
    def example(self) -> str:
        """One of the names."""
        return next((names[0] for names in self._by_accession.values()), "none")

    def find(self, name: str) -> str | None:
        """Returns this name, or else the one with its accession; refuses several of these."""
        same = self._by_accession.get(accession(name), [])
        if len(same) > 1 and name not in same:
            raise InputDataError(
                f"{self._where}: {' and '.join(same[:2])} have the accession of {name}; write the "
                "whole name of each protein"
            )
        return name if name in same else min(same, default=None)


def residues(letters: str, tally: Tally, options: ReadOptions) -> tuple[str, str]:
    """Returns the sequence, or an empty string and the reason for rejecting the record.

    Letters are converted to upper case, white space and a terminal `*` are removed, and J is
    replaced by X; changes are counted in `tally`.
    """
    if not letters.isascii():
        return "", "letter that is not ASCII"
    sequence = letters.encode()
    if sequence.translate(None, _STANDARD):
        sequence, reason = _normalize(sequence, tally, options)
        if reason:
            return "", reason
        letters = sequence.decode()
    if not sequence:
        return "", "blank sequence"
    if len(sequence) > MAX_RESIDUES:
        return "", TOO_LONG
    if not sequence.lstrip(NUCLEOTIDES):
        tally.noted["record of the letters ACGTUN alone"] += 1
    return letters, ""


def are_standard(sequences: Sequence[str]) -> bool:
    """Returns whether `residues` would accept all sequences unchanged and without counts.

    >>> are_standard(["MKV", "W"]), are_standard(["MKV", "X"]), are_standard(["MKV", "ACGT"])
    (True, False, False)
    """
    letters = "".join(sequences)
    return (
        letters.isascii()
        and not letters.encode().translate(None, _STANDARD)
        and max(map(len, sequences)) <= MAX_RESIDUES
        # A blank sequence is also false here.
        and all(sequence.lstrip(_NUCLEOTIDES) for sequence in sequences)
    )


def _normalize(letters: bytes, tally: Tally, options: ReadOptions) -> tuple[bytes, str]:
    """Returns the residues of letters that are not all standard, or the reason for rejection."""
    given = letters.translate(None, _WHITESPACE)
    ungapped = given.translate(None, _GAPS) if options.allow_gaps else given
    capitals = ungapped.upper()
    sequence = capitals.rstrip(b"*")
    if foreign := sequence.translate(None, _RESIDUES + b"J"):
        found = set(foreign)
        return b"", next(
            (reason for reason, kind in _REASONS if found & set(kind)),
            "character that is not a letter",
        )
    if not sequence:
        return b"", "blank sequence"
    changes = {
        "gaps removed": ungapped != given,
        "lower case raised": capitals != ungapped,
        "terminal '*' removed": sequence != capitals,
        "J written as X": b"J" in sequence,
    }
    tally.changed.update(what for what, is_so in changes.items() if is_so)
    if sequence.translate(None, _STANDARD + b"J"):
        tally.noted["record with B, O, U, X or Z"] += 1
    return sequence.replace(b"J", b"X"), ""
