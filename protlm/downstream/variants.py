"""Tables of variants in ProteinGym's format, and the wild types that they refer to.

Notin et al. 2023 (doi:10.1101/2023.12.07.570727): a table of an assay has the columns `mutant` or
`mutated_sequence` or both, `DMS_score`, which is higher for fitter variants, and `DMS_score_bin`. A
reference file has a row for each assay, with the columns `DMS_id` and `target_seq`.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protlm.data.tables import read_table
from protlm.data.vocabulary import capitals
from protlm.downstream.mutations import (
    Variant,
    check_residues,
    is_mutant,
    parse_mutant,
    parse_sequence,
)
from protlm.errors import InputDataError

_EMPTY = ("", "NA", "NaN")


@dataclass(frozen=True)
class VariantTable:
    """The rows of a table, and the variants that they contain.

    Attributes:
        columns: the header.
        rows: the cells, as text.
        variants: one for each row.
        measured: the column DMS_score, float64, NaN where it is empty; None without the column.
        is_fit: the column DMS_score_bin, False where DMS_score is empty; None without either
            column.
    """

    columns: list[str]
    rows: list[list[str]]
    variants: list[Variant]
    measured: np.ndarray | None
    is_fit: np.ndarray | None


def read_variants(path: Path, wild_type: str, *, first_residue: int = 1) -> VariantTable:
    """Reads a table of variants, comma- or tab-separated, plain or gzip.

    A `mutated_sequence` is compared with the wild type; a `mutant` beside it has to agree.

    Args:
        path: the table.
        wild_type: the sequence without mutations, in upper case.
        first_residue: the number of its first residue in the column `mutant`.

    Raises:
        InputDataError: the table is missing or damaged, or a row does not fit the wild type; the
            message has the line.
    """
    columns, lines = read_table(path, "a table of variants")
    if not {"mutant", "mutated_sequence"} & set(columns):
        raise InputDataError(
            f"{path} has the columns {', '.join(columns)[:200]}; name one of them mutant (A1P:D2N) "
            "or mutated_sequence"
        )
    rows, variants, numbers = [], [], []
    for line, row in lines:
        try:
            variants.append(
                _variant(dict(zip(columns, row, strict=True)), wild_type, first_residue)
            )
        except InputDataError as error:
            raise InputDataError(f"{path}, line {line}: {error}") from None
        rows.append(row)
        numbers.append(line)
    if not rows:
        raise InputDataError(f"{path} has no variants; give a table with a row for each variant")
    scores = _numbers(path, columns, rows, "DMS_score")
    bins = _numbers(path, columns, rows, "DMS_score_bin")
    if scores is None or bins is None:
        return VariantTable(columns, rows, variants, scores, None)
    missing = np.flatnonzero(np.isnan(bins) & ~np.isnan(scores))
    if len(missing):
        raise InputDataError(
            f"{path}, line {numbers[missing[0]]}: DMS_score_bin is empty, and DMS_score is not; "
            "fill it in, or remove the column to divide the variants at their median"
        )
    return VariantTable(columns, rows, variants, scores, bins > 0)


def _variant(cells: dict[str, str], wild_type: str, first_residue: int) -> Variant:
    mutant, sequence = (
        capitals(cells.get(name, "").strip()) for name in ("mutant", "mutated_sequence")
    )
    if not mutant and not sequence:
        raise InputDataError("there is neither a mutant nor a mutated_sequence")
    if not sequence:
        return parse_mutant(mutant, wild_type, first_residue=first_residue)
    variant = parse_sequence(sequence, wild_type)
    if variant.indel is not None and is_mutant(mutant):
        raise InputDataError(
            f"mutated_sequence has {len(sequence)} residues, and by {mutant} it has "
            f"{len(wild_type)}, as the wild type; correct one of the two"
        )
    # ProteinGym's tables of insertions and deletions repeat the sequence as `mutant`.
    if mutant and mutant != sequence and variant.indel is None:
        named = parse_mutant(mutant, wild_type, first_residue=first_residue).apply(wild_type)
        for number, (a, b) in enumerate(zip(named, sequence, strict=True), start=first_residue):
            if a != b:
                raise InputDataError(
                    f"mutated_sequence has {b} at position {number}, and by {mutant} it is {a}; "
                    "remove one of the two columns"
                )
    return variant


def _numbers(path: Path, columns: list[str], rows: list[list[str]], name: str) -> np.ndarray | None:
    """Returns a column as float64, NaN where it is empty; None without the column."""
    if name not in columns:
        return None
    place = columns.index(name)
    values = np.full(len(rows), np.nan)
    for number, row in enumerate(rows):
        cell = row[place].strip()
        try:
            values[number] = np.nan if cell in _EMPTY else float(cell)
        except ValueError:
            values[number] = np.inf
        if np.isinf(values[number]):
            raise InputDataError(
                f"{path}: {name} of variant {number + 1} is {cell!r}, not a number; correct it or "
                "leave it empty"
            )
    return values


@dataclass(frozen=True)
class Assay:
    """The row of an assay in ProteinGym's reference file.

    Attributes:
        wild_type: the column target_seq, in upper case.
        protein: the column UniProt_ID, or the name of the assay.
        selection: the column coarse_selection_type; empty without the column.
    """

    wild_type: str
    protein: str
    selection: str


def read_reference(path: Path) -> dict[str, Assay]:
    """Reads a reference file, by DMS_id.

    Raises:
        InputDataError: the file is missing or damaged, or lacks a column.
    """
    columns, lines = read_table(path, "a reference file")
    for name in ("DMS_id", "target_seq"):
        if name not in columns:
            raise InputDataError(
                f"{path} has the columns {', '.join(columns)[:200]}, not {name}; give ProteinGym's "
                "reference file"
            )
    assays = {}
    for line, row in lines:
        cells = dict(zip(columns, row, strict=True))
        name, wild_type = cells["DMS_id"], capitals(cells["target_seq"].strip())
        check_residues(wild_type, f"{path}, line {line}: target_seq")
        if name in assays:
            raise InputDataError(
                f"{path}, line {line}: the DMS_id {name} is in an earlier line too; remove one of "
                "them"
            )
        selection = cells.get("coarse_selection_type", "")
        assays[name] = Assay(wild_type, cells.get("UniProt_ID") or name, selection)
    return assays
