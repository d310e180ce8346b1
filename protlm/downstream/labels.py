"""Labels of proteins or residues: the rows of files, with their sequences, checked and counted."""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from protlm.data.records import Tally, read_records
from protlm.data.records.format_detection import foreign_letters
from protlm.data.records.record import accession, residues
from protlm.data.tables import MISSING, read_text
from protlm.data.vocabulary import capitals
from protlm.downstream.label_files import FITTED, PRED, UNLABELED, Example, fasta_rows, table_rows
from protlm.downstream.residue_labels import are_of_residues, residue_examples
from protlm.options.labels import Form
from protlm.options.prepare import ReadOptions
from protlm.system.errors import InputDataError, UserError


@dataclass(frozen=True)
class LabeledProteins:
    """The examples of files, and whether their labels are of residues: a letter each, or numbers.

    `left_out` and `changed` count rows and sequences by reason, `masked` residues; `in_both` are
    the proteins that the test and another split have.
    """

    examples: list[Example]
    per_residue: bool
    left_out: Mapping[str, int]
    changed: Mapping[str, int] = field(default_factory=dict)
    masked: Mapping[str, int] = field(default_factory=dict)
    in_both: Sequence[str] = ()

    def only(self, keep: Sequence[bool], reason: str) -> "LabeledProteins":
        """Returns the examples to keep, and counts the others under a reason."""
        kept = [one for one, is_kept in zip(self.examples, keep, strict=True) if is_kept]
        lost = len(self.examples) - len(kept)
        counts = {**self.left_out, reason: lost} if lost else self.left_out
        return replace(self, examples=kept, left_out=counts)


def read_labeled_proteins(
    path: Path,
    *,
    sequences: Path | None = None,
    per_residue: bool | None = None,
    form: Form | None = None,
) -> LabeledProteins:
    """Reads tables or FASTA files of labels; rows without one or a sequence are left out.

    A FASTA file without labels in its headers has labels of residues, and needs `sequences`. If
    `per_residue` is None, labels as long as the sequences are of residues.
    """
    form, rows = form or Form(), list[Example]()
    for split, one in ((form.split, path), *form.others):
        found, is_certain = _rows(one, form, split, has_sequences=sequences is not None)
        rows += found
        per_residue = is_certain or per_residue
    # As they are typed: pairs of SaProt have small letters.
    if told := foreign_letters(["".join(one.sequence.split()).encode() for one in rows]):
        raise InputDataError(f"{path}: {told}")
    counts, tally, hidden = Counter[str](), Tally(), Counter[str]()
    if lost := [one for one in form.test_sets if one not in {row.split for row in rows}]:
        raise UserError(f"{path} has no row with the split {lost[0]}, a test set")
    examples = list(_usable(_assigned(rows, form), sequences, counts, tally))
    examples = _with_splits(examples, form, counts)
    if not examples:
        reasons = ", ".join(f"{n:,} {why}" for why, n in counts.items() if n)
        advice = "give a row, or in FASTA files TARGET= after a blank, for each protein"
        raise InputDataError(f"{path} has no labels ({reasons}); {advice}")
    _check_labels(path, examples)
    if per_residue is None:
        per_residue = are_of_residues(examples)
    if per_residue:
        examples = residue_examples(examples, counts, hidden)
    elif mask := next((one for one in examples if "MASK=" in one.masks), None):
        raise InputDataError(f"{mask.place}: MASK= needs a label of each residue in TARGET=")
    examples, in_both = _distinct(examples, counts)
    # Without zeros.
    left_out, some = +counts, +hidden
    return LabeledProteins(examples, per_residue, left_out, tally.changed, some, in_both)


def _rows(
    path: Path, form: Form, split: str, *, has_sequences: bool
) -> tuple[list[Example], bool | None]:
    """Returns the rows of a file, and True if its form says that the labels are of residues."""
    text = read_text(path, "a file of labels")
    if not text.lstrip().startswith(">"):
        if form.header is not None:
            raise UserError(
                f"{path} is not a FASTA file, whose headers may have labels", {"header": None}
            )
        return list(table_rows(path, form, split)), None
    if (form.column or form.columns or form.fold) and not form.others:
        raise UserError(
            f"{path} is a FASTA file, whose labels are TARGET= in the headers, or letters of "
            "residues in place of these, not columns",
            {"column": None, "columns": None, "fold": None},
        )
    are_letters = form.header is None and "TARGET=" not in text
    if are_letters and not has_sequences:
        raise UserError(
            f"{path}: the headers lack TARGET= and SET= (of labels of proteins: '>ID TARGET=class "
            "SET=train'); if the letters are labels of residues, their sequences are missing; or "
            "the second word of the headers may be the label",
            {"sequences": "FASTA", "header": "header"},
        )
    rows = list(fasta_rows(path, text, form, split, letters_are_labels=are_letters))
    mask = next((one for one in path.parent.glob("mask.fa*") if one.name != path.name), None)
    if are_letters and mask is not None:
        found = fasta_rows(mask, read_text(mask, "a mask"), Form(), "", letters_are_labels=True)
        masks = {one.identifier: one.label for one in found}
        if lost := [one for one in rows if one.identifier not in masks]:
            raise InputDataError(
                f"{lost[0].place}: {mask} has no mask of {lost[0].identifier}; add it, or move the "
                "file to another folder"
            )
        rows = [replace(one, masks={**one.masks, mask.name: masks[one.identifier]}) for one in rows]
    return rows, are_letters or None


def _assigned(rows: list[Example], form: Form) -> list[Example]:
    """Returns the rows with the splits of files of identifiers, if there are any."""
    found = [] if form.splits else rows
    for split, path in form.splits:
        lines = read_text(path, "a file of identifiers").splitlines()
        names = {re.split(r"[,\t]", line.strip())[0] for line in lines}
        found += (some := [replace(one, split=split) for one in rows if one.identifier in names])
        if not some:
            raise InputDataError(f"{path} has no identifier of a protein with a label")
    named = {one.identifier for one in found}
    return [*found, *(replace(one, split="") for one in rows if one.identifier not in named)]


def _with_splits(examples: list[Example], form: Form, counts: Counter[str]) -> list[Example]:
    """Returns the examples of a fold or a split, if there are any, and counts the others."""
    what = "split" if form.fold is None else "fold"
    kept = [one for one in examples if getattr(one, what) not in MISSING]
    if not kept and form.fold is None:
        return examples
    counts[f"without a {what}"] = len(examples) - len(kept)
    return kept


def _distinct(examples: Sequence[Example], counts: Counter[str]) -> tuple[list[Example], list[str]]:
    """Drops and counts repeated examples; one that the test also has leaves the other split."""
    kept: dict[str, Example] = {}
    both: dict[str, None] = {}
    for one in examples:
        # Without identifiers, proteins are known by their sequences.
        key = one.identifier if one.is_named else f">{one.sequence}"
        other = kept.setdefault(key, one)
        if other is one:
            continue
        to_fit, is_same = {one.split, other.split} & {*FITTED}, one.split == other.split
        differs = (one.sequence, one.label, one.fold) != (other.sequence, other.label, other.fold)
        if differs or not (is_same or len(to_fit) == 1):
            same = one.identifier if one.is_named else f"the sequence of {other.identifier}"
            what = "another label, sequence or fold" if differs else f"the split {other.split}"
            how = "change names that only number rows" if one.is_named else "add identifiers"
            advice = f"remove one, or {how}"
            raise InputDataError(f"{one.place}: {same} is repeated, with {what}; {advice}")
        counts["identical to an earlier one" if is_same else "that the test has too"] += 1
        if not is_same:
            both[one.identifier] = None
            kept[key] = other if one.split in to_fit else one
    # Those of a file with identifiers and of one without them are compared by their sequences.
    tested = {(one.sequence, one.is_named) for one in kept.values() if one.split not in FITTED}
    for key, one in [*kept.items()]:
        if one.split in FITTED and (one.sequence, not one.is_named) in tested:
            both[kept.pop(key).identifier] = None
            counts["that the test has too"] += 1
    return list(kept.values()), list(both)


def _usable(
    rows: Sequence[Example], sequences: Path | None, counts: Counter[str], tally: Tally
) -> Iterator[Example]:
    """Yields the usable rows with their sequences, and counts the others."""
    wanted = {name for one in rows for name in (one.identifier, accession(one.identifier))}
    found = None if sequences is None else _sequences(sequences, wanted)
    # Beside + or ++, - is a class.
    missing = MISSING - {"-" for one in rows if {*one.label} == {"+"}}
    for one in rows:
        if one.split == PRED:
            counts["in the set pred"] += 1
        elif one.label in missing or not one.label.strip(UNLABELED):
            counts["without a label"] += 1
        else:
            sequence, reason = _residues_of(one, found, sequences, tally)
            if not reason:
                yield replace(one, sequence=sequence)
            else:
                counts[f"with a rejected sequence ({reason})"] += 1


def _residues_of(
    one: Example, found: Mapping[str, tuple[str, str]] | None, sequences: Path | None, tally: Tally
) -> tuple[str, str]:
    """Returns the sequence, and the reason why it is rejected or an empty string."""
    if found is not None:
        name = one.identifier if one.identifier in found else accession(one.identifier)
        if name not in found and not one.sequence:
            raise InputDataError(f"{one.place}: {sequences} has no sequence of {one.identifier}")
        if name in found:
            return found[name]
    if not one.sequence:
        raise UserError(
            f"{one.place} has no sequence; add a column sequence, or a file of sequences",
            {"sequences": "FASTA"},
        )
    return residues(one.sequence, tally, ReadOptions())


def _check_labels(path: Path, examples: Sequence[Example]) -> None:
    """Refuses labels that are the sequences themselves."""
    same = sum(capitals(one.label) == one.sequence for one in examples)
    if 2 * same >= len(examples):
        raise InputDataError(
            f"{path}: {same:,} of {len(examples):,} labels are the sequences themselves; headers "
            "of labels of proteins need TARGET= and SET= ('>ID TARGET=class SET=train')"
        )


def _sequences(path: Path, wanted: Set[str]) -> dict[str, tuple[str, str]]:
    """Returns the wanted sequences, or why they are rejected, by identifier and its accession."""
    # The rows of all rejected records are counted.
    found, tally = {}, Tally()
    tally.max_listed = sys.maxsize
    for record in read_records(path, tally):
        usable = record.sequence, ""
        if record.identifier in wanted:
            if found.get(record.identifier, usable) != usable:
                raise InputDataError(
                    f"{path} has different sequences of {record.identifier}; remove all but one"
                )
            found[record.identifier] = usable
        if (name := accession(record.identifier)) in wanted:
            found.setdefault(name, usable)
    for reason, some in tally.listed.items():
        for identifier, _, _ in some:
            found.setdefault(accession(identifier), found.setdefault(identifier, ("", reason)))
    tally.warn_of_rejected(path)
    return found
