"""Variants of a protein, substitutions such as A1P:D2N, insertions and deletions; their tables.

Tables and reference files are those of ProteinGym (Notin et al. 2023,
doi:10.1101/2023.12.07.570727): a table of an assay has the columns `mutant` or `mutated_sequence`
or both, `DMS_score`, which is higher for fitter variants, and `DMS_score_bin`; of a gene's clinical
variants, `DMS_bin_score`, Benign or Pathogenic. A reference file has a row for each assay, with the
columns `DMS_id` and `target_seq`.
"""

import re
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protlm.data.records.record import Tally, residues
from protlm.data.tables import MISSING, number_meant, number_of, places_of, read_table
from protlm.data.vocabulary import STANDARD, VOCABULARY, capitals
from protlm.options.prepare import ReadOptions
from protlm.system.errors import InputDataError

_CODES = dict(
    re.findall(
        r"(\w+)=(.)",
        "ALA=A ARG=R ASN=N ASP=D CYS=C GLN=Q GLU=E GLY=G HIS=H ILE=I LEU=L LYS=K MET=M PHE=F PRO=P "
        "SER=S THR=T TRP=W TYR=Y VAL=V ASX=B GLX=Z PYL=O SEC=U XAA=X TER=*",
    )
)
_LETTER = "|".join(["[A-Z]", *_CODES])
_SUBSTITUTION = re.compile(rf"(?ai)({_LETTER})([0-9]{{1,9}})({_LETTER}|[=*])")
_INDEL = re.compile(r"[0-9](?:del|dup|ins|[-Δ∆]$)|^[Δ∆]", re.IGNORECASE)
# Names of HGVS, also with the accession of the protein: NP_000537.3:p.[Ala1Pro;Asp2Asn].
_HGVS = re.compile(r"(?ai)(?:(?:NP_|XP_|ENSP)[0-9.]+:)?P\.(\[[^][]*\]|[^][;:]*)")
# Those of Enrich2 and MaveDB, synonymous variants among them, and others that people write.
_WILD_TYPES = ("=", "_WT", "_SY", "WT", "WILD TYPE", "WILD-TYPE", "WILDTYPE", "SYNONYMOUS")
_CLINICAL = {"benign": "1", "pathogenic": "0"}
_MUTANT_ADVICE = "name one of them mutant (A1P:D2N) or mutated_sequence"
_ADVICE = "give the wild type of these variants, or the number of its first residue"


class Substitution(NamedTuple):
    """A replaced residue; its position counts from 0."""

    wild_type: str
    position: int
    mutant: str


@dataclass(frozen=True, slots=True)
class Variant:
    """The substitutions of a variant, none of the wild type; or of an indel the whole sequence."""

    substitutions: tuple[Substitution, ...] = ()
    indel: str | None = None

    def __post_init__(self) -> None:
        for own, _, mutant in self.substitutions:
            for letter in (own, mutant):
                if letter not in STANDARD:
                    raise InputDataError(
                        f"{own} replaced by {mutant} has no score, as {letter} is not one of the "
                        f"20 amino acids {STANDARD}; remove this variant"
                    )

    def apply(self, wild_type: str) -> str:
        """Returns the sequence of the variant.

        >>> Variant((Substitution("M", 0, "A"), Substitution("T", 2, "W"))).apply("MKT")
        'AKW'
        """
        if self.indel is not None:
            return self.indel
        residues = list(wild_type)
        for substitution in self.substitutions:
            residues[substitution.position] = substitution.mutant
        return "".join(residues)


def parse_mutant(text: str, wild_type: str, *, first_residue: int = 1) -> Variant:
    """Parses substitutions in the notation of ProteinGym, joined by colons, or of HGVS.

    For instance A1P:D2N, Ala1Pro, p.[Ala1Pro;Asp2Asn], or of the wild type `_wt`, WT or p.=. They
    refer to the wild type, whose first residue has the number `first_residue`.

    >>> parse_mutant("K2R", "MKT").substitutions
    (Substitution(wild_type='K', position=1, mutant='R'),)
    """
    for match in (matches := [_SUBSTITUTION.fullmatch(one) for one in _substitutions(text)]):
        if match is None or capitals(match[3]) in ("*", "TER"):
            stop = "" if match is None else " but a stop, which has no score"
            advice = "write it as A1P or p.Ala1Pro, and several as A1P:D2N"
            if match is None and _INDEL.search(text):
                advice = "to score insertions and deletions, add a column mutated_sequence"
            raise InputDataError(f"{text.strip()[:50]!r} is not a substitution{stop}; {advice}")
    found = [_parse(match, wild_type, first_residue) for match in matches if match]
    for position, count in Counter(substitution.position for substitution in found).items():
        if count > 1:
            raise InputDataError(
                f"{text} replaces position {position + first_residue} more than once; name each "
                "position once"
            )
    return Variant(tuple(found))


def is_mutant(text: str) -> bool:
    """Returns whether a text is substitutions by its notation, which may not fit a wild type.

    >>> is_mutant("A1P:D2N"), is_mutant("p.Ala1Pro"), is_mutant("_wt"), is_mutant("MKT")
    (True, True, True, False)
    """
    return all(_SUBSTITUTION.fullmatch(one) for one in _substitutions(text))


def _substitutions(text: str) -> list[str]:
    """Returns the substitutions of a text; none of the wild type."""
    letters = text.strip()
    parts = letters.split(":")
    if hgvs := _HGVS.fullmatch(letters):
        parts = [part.strip(" ()") for part in hgvs[1].strip("[]").split(";")]
    return [] if capitals(parts[0]) in _WILD_TYPES and len(parts) == 1 else parts


def _parse(match: re.Match[str], wild_type: str, first_residue: int) -> Substitution:
    part, number = match[0], int(match[2])
    expected, mutant = (_CODES.get(one, one) for one in map(capitals, match.group(1, 3)))
    position = number - first_residue
    if not 0 <= position < len(wild_type):
        raise InputDataError(
            f"{part}: position {number} does not exist, the wild type has the residues "
            f"{first_residue} to {first_residue + len(wild_type) - 1}; {_ADVICE}"
        )
    if wild_type[position] != expected:
        raise InputDataError(
            f"{part}: position {number} of the wild type is {wild_type[position]}, not {expected}; "
            f"{_ADVICE}"
        )
    mutant = expected if mutant == "=" else mutant
    VOCABULARY.encode(mutant, f"{part}: ")
    return Substitution(expected, position, mutant)


def parse_sequence(sequence: str, wild_type: str) -> Variant:
    """Compares the sequence of a variant with the wild type.

    >>> parse_sequence("MRT", "MKT").substitutions
    (Substitution(wild_type='K', position=1, mutant='R'),)
    >>> parse_sequence("MKKT", "MKT").indel
    'MKKT'
    """
    sequence = capitals(sequence)
    VOCABULARY.encode(sequence, "mutated_sequence: ")
    if len(sequence) != len(wild_type):
        return Variant(indel=sequence)
    pairs = enumerate(zip(wild_type, sequence, strict=True))
    return Variant(tuple(Substitution(a, i, b) for i, (a, b) in pairs if a != b))


_MOST_LISTED = 5
# Names of the column `mutant` in other programs' tables, when there is no mutated_sequence.
_MUTANTS = ("hgvs_pro", "variant", "mutation")
# Rows on which other numbers of the first residue are tried.
_TRIED = 500


class _RejectedError(InputDataError):
    """A sequence that a FASTA file could not have either: its row is counted, and not scored."""


@dataclass(frozen=True)
class VariantTable:
    """The rows of a table, and the variants of those that are `scored`, by their numbers.

    `measured` is the column DMS_score, `is_fit` DMS_score_bin; `unscored` has lines and reasons.
    Of clinical variants, `measured` is 1 for benign ones and 0 for pathogenic ones.
    """

    columns: list[str]
    rows: list[list[str]]
    variants: list[Variant]
    measured: np.ndarray | None
    is_fit: np.ndarray | None
    scored: list[int]
    unscored: list[str]
    is_clinical: bool = False
    # What a column was taken for, and what the metrics leave out.
    notes: list[str] = field(default_factory=list)

    def describe_unscored(self, path: Path) -> str:
        """Returns the number of rows that are not scored, with the first lines and reasons."""
        if len(self.unscored) == 1:
            return f"{path}, {self.unscored[0]}"
        rows = f"{len(self.unscored):,} of {len(self.rows):,} rows"
        listed = [
            one.rpartition("; ") if "; " in one else (one, "", "")
            for one in self.unscored[:_MOST_LISTED]
        ]
        more = ["..."] if len(self.unscored) > _MOST_LISTED else []
        # Each advice follows the rows that it is about.
        reasons = {advice: [x[0] for x in listed if x[2] == advice] for *_, advice in listed}
        parts = [", ".join(some) + f" ({one})" * bool(one) for one, some in reasons.items()]
        return f"{path}: {rows} cannot be scored: {'; '.join([*parts, *more])}"


def read_variants(
    path: Path,
    wild_type: str,
    *,
    first_residue: int = 1,
    skip_invalid: bool = False,
    label: str = "DMS_score",
) -> VariantTable:
    """Reads a table of variants, comma- or tab-separated, plain or gzip.

    Rows that cannot be scored are refused, or left out with `skip_invalid`. `label` is the column
    of measured scores.
    """
    names = ("mutant", "mutated_sequence", "DMS_score", "DMS_score_bin", "DMS_bin_score", *_MUTANTS)
    columns, lines = read_table(path, "a table of variants", names)
    table = VariantTable(columns, [], [], None, None, [], [])
    invalid, numbers, mutants = 0, [], list[str]()
    own = next((name for name in ("mutant", *_MUTANTS) if name in columns), None)
    own = "mutant" if "mutated_sequence" in columns else own
    is_lost = label not in (*columns, "DMS_score")
    if own is None or is_lost:
        shown = f"{path} has the columns {', '.join(columns)[:200]}"
        if is_lost:
            raise InputDataError(f"{shown}; the label {label} is not one", {"label": "COLUMN"})
        raise InputDataError(f"{shown}; {_MUTANT_ADVICE}")
    if own != "mutant":
        table.notes.append(f"mutants from the column {own}")
    for line, row in lines:
        cells = dict(zip(columns, row, strict=True))
        cells["mutant"] = cells.get(own, "")
        mutants.append(cells["mutant"])
        try:
            table.variants.append(_variant(cells, wild_type, first_residue))
            table.scored.append(len(table.rows))
        except InputDataError as error:
            table.unscored.append(f"line {line}: {error}")
            invalid += not isinstance(error, _RejectedError)
        table.rows.append(row)
        numbers.append(line)
    if not table.rows:
        raise InputDataError(f"{path} has no variants; give a table with a row for each variant")
    are_most = 2 * invalid > len(table.rows)
    other = _other_number(mutants[:_TRIED], wild_type, first_residue) if are_most else None
    if not table.variants or other is not None or (invalid and not skip_invalid):
        found = table.describe_unscored(path)
        if other is not None:
            number, advice = other
            raise InputDataError(f"{found}; {advice}", {"first_residue": number})
        if table.variants:
            raise InputDataError(
                f"{found}; correct this, or leave their scores empty", {"skip_invalid": True}
            )
        raise InputDataError(
            f"{found}; give a table whose mutants fit the wild type", {"first_residue": "NUMBER"}
        )
    if label not in columns and "DMS_bin_score" in columns:
        scores = _once(path, table, numbers, "DMS_bin_score")
        return replace(table, measured=scores, is_fit=scores == 1, is_clinical=True)
    scores, bins = _once(path, table, numbers, label), None
    if label == "DMS_score":
        bins = _numbers(path, table, numbers, "DMS_score_bin")
    if scores is None or bins is None:
        return replace(table, measured=scores)
    missing = np.flatnonzero(np.isnan(bins) & ~np.isnan(scores))
    if len(missing):
        raise InputDataError(
            f"{path}, line {numbers[table.scored[missing[0]]]}: DMS_score_bin is empty, and "
            "DMS_score is not; fill it in, or remove the column to divide the variants at their "
            "median"
        )
    return replace(table, measured=scores, is_fit=bins > 0)


def _other_number(mutants: list[str], wild_type: str, first_residue: int) -> tuple[int, str] | None:
    """Returns another number of the first residue that nearly all rows fit, and says so."""

    def fits(text: str, shift: int) -> bool:
        with suppress(InputDataError):
            return bool(parse_mutant(text, wild_type, first_residue=first_residue + shift))
        return False

    number, _, shift = max(
        (sum(fits(one, shift) for one in mutants), -abs(shift), shift) for shift in range(-50, 51)
    )
    if not shift or number < max(2, 0.9 * len(mutants)):
        return None
    other = first_residue + shift
    return other, (
        f"{number:,} of {len(mutants):,} rows fit if the first residue is {other}; otherwise, rows "
        "that fit by chance would be scored as other variants"
    )


def _once(path: Path, table: VariantTable, lines: list[int], name: str) -> np.ndarray | None:
    """Returns a column as `_numbers` does, NaN for the wild type and for repeated variants."""
    if (values := _numbers(path, table, lines, name)) is None:
        return None
    seen: dict[object, int] = {}
    left_out = []
    for row in np.flatnonzero(~np.isnan(values)).tolist():
        changed = (x[1:] for x in table.variants[row].substitutions if x.mutant != x.wild_type)
        variant = table.variants[row].indel or frozenset(changed)
        first = seen.setdefault(variant, row)
        if variant and values[first] != values[row]:
            raise InputDataError(
                f"{path}, line {lines[table.scored[row]]}: {name} is {values[row]:g}, and in line "
                f"{lines[table.scored[first]]}, of the same variant, {values[first]:g}; keep one"
            )
        left_out += [row] if first != row or not variant else []
    values[left_out] = np.nan
    if left_out:
        table.notes.append(
            "rows of the wild type, synonymous or repeated, which the metrics leave out: "
            f"{len(left_out):,}"
        )
    return values


def _variant(cells: dict[str, str], wild_type: str, first_residue: int) -> Variant:
    mutant, given = (cells.get(name, "").strip() for name in ("mutant", "mutated_sequence"))
    if not mutant and not given:
        raise InputDataError("there is neither a mutant nor a mutated_sequence")
    if not given:
        return parse_mutant(mutant, wild_type, first_residue=first_residue)
    sequence, reason = residues(given, Tally(), ReadOptions())
    if reason:
        raise _RejectedError(f"mutated_sequence is rejected: {reason}")
    variant = parse_sequence(sequence, wild_type)
    if variant.indel is not None and is_mutant(mutant):
        raise InputDataError(
            f"mutated_sequence has {len(sequence)} residues, and by {mutant} it has "
            f"{len(wild_type)}, as the wild type; correct one of the two"
        )
    # ProteinGym's tables of insertions and deletions repeat the sequence as `mutant`.
    is_sequence = capitals(mutant) in ("", sequence, capitals(given))
    if not is_sequence and "delins" not in mutant and variant.indel is None:
        named = parse_mutant(mutant, wild_type, first_residue=first_residue).apply(wild_type)
        for number, (a, b) in enumerate(zip(named, sequence, strict=True), start=first_residue):
            if a != b:
                raise InputDataError(
                    f"mutated_sequence has {b} at position {number}, and by {mutant} it is {a}; "
                    "remove one of the two columns"
                )
    return variant


def _numbers(path: Path, table: VariantTable, lines: list[int], name: str) -> np.ndarray | None:
    """Returns a column of the scored rows, NaN where it is empty; None without the column."""
    if name not in table.columns:
        return None
    place = table.columns.index(name)
    values = np.full(len(table.scored), np.nan)
    for number, row in enumerate(table.scored):
        cell = table.rows[row][place].strip()
        cell = _CLINICAL.get(cell.lower(), cell) if name == "DMS_bin_score" else cell
        if cell in MISSING:
            continue
        if (value := number_of(cell)) is None:
            raise InputDataError(
                f"{path}, line {lines[row]}: {name} of variant {row + 1} is {cell!r}, not a "
                f"number with a decimal point; type {number_meant(cell) or 'one'} or leave it empty"
            )
        values[number] = value
    return values


@dataclass(frozen=True)
class Assay:
    """The row of an assay in ProteinGym's reference file."""

    wild_type: str
    protein: str
    selection: str


def read_reference(path: Path) -> dict[str, Assay]:
    """Reads a reference file, by DMS_id."""
    names = ("DMS_id", "target_seq", "UniProt_ID", "coarse_selection_type")
    columns, lines = read_table(path, "a reference file", names)
    places_of(path, columns, names[:2])
    assays = {}
    for line, row in lines:
        cells = dict(zip(columns, row, strict=True))
        name = cells["DMS_id"].strip()
        wild_type, reason = residues(cells["target_seq"], Tally(), ReadOptions())
        if name in assays:
            raise InputDataError(
                f"{path}, line {line}: the DMS_id {name} is in an earlier line too; remove one of "
                "them"
            )
        if reason:
            warnings.warn(
                f"{path}, line {line}: {name} is left out, target_seq: {reason}", stacklevel=2
            )
            continue
        selection = cells.get("coarse_selection_type", "")
        assays[name] = Assay(wild_type, cells.get("UniProt_ID") or name, selection)
    return assays
