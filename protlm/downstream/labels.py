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
    for split, file in ((form.split, path), *form.others):
        rows_of_file, is_certain = _rows(file, form, split, has_sequences=sequences is not None)
        rows += rows_of_file
        per_residue = is_certain or per_residue
    # As they are typed: pairs of SaProt have small letters.
    if reason := foreign_letters(["".join(row.sequence.split()).encode() for row in rows]):
        raise InputDataError(f"{path}: {reason}")
    counts, tally, masked = Counter[str](), Tally(), Counter[str]()
    splits = {row.split for row in rows}
    if lost := [name for name in form.test_sets if name not in splits]:
        raise UserError(f"{path} has no row with the split {lost[0]}, a test set")
    examples = list(_usable(_assigned(rows, form), sequences, counts, tally))
    examples = _with_splits(examples, form, counts)
    if not examples:
        reasons = ", ".join(f"{n:,} {why}" for why, n in counts.items() if n)
        raise InputDataError(
            f"{path} has no labels ({reasons}); give a row, or in FASTA files TARGET= after a "
            "blank, for each protein"
        )
    _check_labels(path, examples)
    if per_residue is None:
        per_residue = are_of_residues(examples)
    if per_residue:
        examples = residue_examples(examples, counts, masked)
    elif example := next((one for one in examples if "MASK=" in one.masks), None):
        raise InputDataError(f"{example.place}: MASK= needs a label of each residue in TARGET=")
    examples, in_both = _distinct(examples, counts)
    # The sign leaves out what was counted 0 times.
    return LabeledProteins(examples, per_residue, +counts, tally.changed, +masked, in_both)


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
    mask = next((file for file in path.parent.glob("mask.fa*") if file.name != path.name), None)
    if are_letters and mask is not None:
        rows = _masked(rows, mask)
    return rows, are_letters or None


def _masked(rows: list[Example], path: Path) -> list[Example]:
    """Returns the rows with the masks of a FASTA file, which has one for each."""
    letters = fasta_rows(path, read_text(path, "a mask"), Form(), "", letters_are_labels=True)
    mask_of = {row.identifier: row.label for row in letters}
    for row in rows:
        if row.identifier not in mask_of:
            raise InputDataError(
                f"{row.place}: {path} has no mask of {row.identifier}; add it, or move the file to "
                "another folder"
            )
    return [replace(x, masks={**x.masks, path.name: mask_of[x.identifier]}) for x in rows]


def _assigned(rows: list[Example], form: Form) -> list[Example]:
    """Returns the rows with the splits of files of identifiers, if there are any."""
    if not form.splits:
        return rows
    assigned = list[Example]()
    for split, path in form.splits:
        lines = read_text(path, "a file of identifiers").splitlines()
        names = {re.split(r"[,\t]", line.strip())[0] for line in lines}
        members = [replace(row, split=split) for row in rows if row.identifier in names]
        if not members:
            raise InputDataError(f"{path} has no identifier of a protein with a label")
        assigned += members
    named = {row.identifier for row in assigned}
    return [*assigned, *(replace(row, split="") for row in rows if row.identifier not in named)]


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
    in_both: dict[str, None] = {}
    for example in examples:
        # Without identifiers, proteins are known by their sequences.
        key = example.identifier if example.is_named else f">{example.sequence}"
        earlier = kept.setdefault(key, example)
        if earlier is example:
            continue
        is_same = example.split == earlier.split
        to_fit = {example.split, earlier.split} & {*FITTED}
        differs = any(
            getattr(example, name) != getattr(earlier, name)
            for name in ("sequence", "label", "fold")
        )
        if differs or not (is_same or len(to_fit) == 1):
            raise _repeated(example, earlier, differs=differs)
        counts["identical to an earlier one" if is_same else "that the test has too"] += 1
        if not is_same:
            in_both[example.identifier] = None
            kept[key] = earlier if example.split in to_fit else example
    # Those of a file with identifiers and of one without them are compared by their sequences.
    tested = {(one.sequence, one.is_named) for one in kept.values() if one.split not in FITTED}
    for key, example in [*kept.items()]:
        if example.split in FITTED and (example.sequence, not example.is_named) in tested:
            in_both[kept.pop(key).identifier] = None
            counts["that the test has too"] += 1
    return list(kept.values()), list(in_both)


def _repeated(example: Example, earlier: Example, *, differs: bool) -> InputDataError:
    same, advice = example.identifier, "change names that only number rows"
    if not example.is_named:
        same, advice = f"the sequence of {earlier.identifier}", "add identifiers"
    what = "another label, sequence or fold" if differs else f"the split {earlier.split}"
    return InputDataError(
        f"{example.place}: {same} is repeated, with {what}; remove one, or {advice}"
    )


def _usable(
    rows: Sequence[Example], sequences: Path | None, counts: Counter[str], tally: Tally
) -> Iterator[Example]:
    """Yields the usable rows with their sequences, and counts the others."""
    wanted = {name for row in rows for name in (row.identifier, accession(row.identifier))}
    found = None if sequences is None else _sequences(sequences, wanted)
    # Beside + or ++, - is a class.
    missing = MISSING - {"-"} if any({*row.label} == {"+"} for row in rows) else MISSING
    for row in rows:
        if row.split == PRED:
            counts["in the set pred"] += 1
        elif row.label in missing or not row.label.strip(UNLABELED):
            counts["without a label"] += 1
        else:
            sequence, reason = _residues_of(row, found, sequences, tally)
            if reason:
                counts[f"with a rejected sequence ({reason})"] += 1
            else:
                yield replace(row, sequence=sequence)


def _residues_of(
    row: Example, found: Mapping[str, tuple[str, str]] | None, sequences: Path | None, tally: Tally
) -> tuple[str, str]:
    """Returns the sequence, and the reason why it is rejected or an empty string."""
    for name in (row.identifier, accession(row.identifier)):
        if found is not None and name in found:
            return found[name]
    if found is not None and not row.sequence:
        raise InputDataError(f"{row.place}: {sequences} has no sequence of {row.identifier}")
    if not row.sequence:
        raise UserError(
            f"{row.place} has no sequence; add a column sequence, or a file of sequences",
            {"sequences": "FASTA"},
        )
    return residues(row.sequence, tally, ReadOptions())


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
        # The sequence, and no reason to reject it.
        usable = record.sequence, ""
        if record.identifier in wanted:
            if found.get(record.identifier, usable) != usable:
                raise InputDataError(
                    f"{path} has different sequences of {record.identifier}; remove all but one"
                )
            found[record.identifier] = usable
        if (name := accession(record.identifier)) in wanted:
            found.setdefault(name, usable)
    for reason, rejected in tally.listed.items():
        for identifier, _, _ in rejected:
            known = found.setdefault(identifier, ("", reason))
            found.setdefault(accession(identifier), known)
    tally.warn_of_rejected(path)
    return found
