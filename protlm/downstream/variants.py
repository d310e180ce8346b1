"""Tables of variants in ProteinGym's format, and the wild types that they refer to.

Notin et al. 2023 (doi:10.1101/2023.12.07.570727): a table of an assay has the columns `mutant` or
`mutated_sequence` or both, `DMS_score`, which is higher for fitter variants, and `DMS_score_bin`. A
reference file has a row for each assay, with the columns `DMS_id` and `target_seq`.
"""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from protlm.data.records import ReadOptions, Tally
from protlm.data.records.residues import residues
from protlm.data.tables import MISSING, number_meant, number_of, read_table
from protlm.data.vocabulary import capitals
from protlm.downstream.mutations import Variant, is_mutant, parse_mutant, parse_sequence
from protlm.system.errors import InputDataError

_MOST_LISTED = 5


class _RejectedError(InputDataError):
    """A sequence that a FASTA file could not have either: its row is counted, and not scored."""


@dataclass(frozen=True)
class VariantTable:
    """The rows of a table, and the variants that they contain.

    Attributes:
        columns: the header.
        rows: the cells, as text.
        variants: one for each row that is scored.
        measured: the column DMS_score of these, float64, NaN where it is empty; None without the
            column.
        is_fit: the column DMS_score_bin of these, False where DMS_score is empty; None without
            either column.
        scored: the numbers of these rows.
        unscored: line and reason of the others.
    """

    columns: list[str]
    rows: list[list[str]]
    variants: list[Variant]
    measured: np.ndarray | None
    is_fit: np.ndarray | None
    scored: list[int]
    unscored: list[str]

    def describe_unscored(self, path: Path) -> str:
        """Returns the number of rows that are not scored, with the first lines and reasons."""
        if len(self.unscored) == 1:
            return f"{path}, {self.unscored[0]}"
        rows = f"{len(self.unscored):,} of {len(self.rows):,} rows"
        listed = [one.rpartition("; ") for one in self.unscored[:_MOST_LISTED]]
        more = ["..."] if len(self.unscored) > _MOST_LISTED else []
        parts = [*(reason or whole for reason, _, whole in listed), *more]
        parts += dict.fromkeys(advice for reason, _, advice in listed if reason)
        return f"{path}: {rows} cannot be scored: {'; '.join(parts)}"


def read_variants(
    path: Path, wild_type: str, *, first_residue: int = 1, skip_invalid: bool = False
) -> VariantTable:
    """Reads a table of variants, comma- or tab-separated, plain or gzip.

    A `mutated_sequence` is compared with the wild type; a `mutant` beside it has to agree. Rows
    whose `mutated_sequence` a FASTA file could not have are not scored; other rows that cannot be
    scored are refused, or left out with `skip_invalid`. `first_residue` is the number of the wild
    type's first residue in the column `mutant`.
    """
    names = ("mutant", "mutated_sequence", "DMS_score", "DMS_score_bin")
    columns, lines = read_table(path, "a table of variants", names)
    if not {"mutant", "mutated_sequence"} & set(columns):
        raise InputDataError(
            f"{path} has the columns {', '.join(columns)[:200]}; name one of them mutant (A1P:D2N) "
            "or mutated_sequence; of MaveDB, rename hgvs_pro to mutant and score to DMS_score"
        )
    table, invalid, numbers = VariantTable(columns, [], [], None, None, [], []), 0, []
    for line, row in lines:
        cells = dict(zip(columns, row, strict=True))
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
    if not table.variants or (invalid and not skip_invalid):
        skip = "correct this, or type --skip-invalid to leave their scores empty"
        advice = skip if table.variants else "give a table whose mutants fit the wild type"
        raise InputDataError(f"{table.describe_unscored(path)}; {advice}")
    scores, bins = (_numbers(path, table, numbers, name) for name in ("DMS_score", "DMS_score_bin"))
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
    """The row of an assay in ProteinGym's reference file.

    The protein is the column UniProt_ID, or the name of the assay; the selection is
    coarse_selection_type, and empty without the column.
    """

    wild_type: str
    protein: str
    selection: str


def read_reference(path: Path) -> dict[str, Assay]:
    """Reads a reference file, by DMS_id."""
    names = ("DMS_id", "target_seq", "UniProt_ID", "coarse_selection_type")
    columns, lines = read_table(path, "a reference file", names)
    for name in ("DMS_id", "target_seq"):
        if name not in columns:
            raise InputDataError(
                f"{path} has the columns {', '.join(columns)[:200]}, not {name}; give ProteinGym's "
                "reference file"
            )
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
