"""Labels of proteins or residues: tables, and the FASTA files of FLIP and biotrainer.

Dallago et al. 2021 (doi:10.1101/2021.11.09.467890): a table has the columns sequence, target, set
and validation; headers of FASTA files have SET=, TARGET= and VALIDATION=; labels of residues are a
second FASTA file, with one letter for each residue.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from protlm.data.records import ReadOptions, Tally, read_records
from protlm.data.records.record import accession, residues
from protlm.data.tables import MISSING, read_table, read_text
from protlm.data.vocabulary import capitals
from protlm.system.errors import InputDataError, UserError

TRAIN, VALID, TEST = "train", "valid", "test"
UNLABELED = "?"
_SPLITS = {"train": TRAIN} | dict.fromkeys(["valid", "validation", "val", "dev"], VALID)
_SPLITS["test"] = TEST
_NAMES = ("identifier", "accession", "id")
_LABELS = ("label", "target")
_OTHERS = ("sequence", "split", "set", "validation", "cluster")
_ATTRIBUTES = ("SET", "TARGET", "VALIDATION", "CLUSTER")
# An attribute of a header ends at the next one or with the header, so a target may have spaces.
_KEY = re.compile(r"(?<!\S)(\w+)=")
# Those that are not applied, and change what a record or its label means.
_FOREIGN = re.compile(r"^>.*[ \t](MASK|INTERACTOR)=", re.MULTILINE)
_NUCLEOTIDE_LETTERS = 50
_MASK_ADVICE = f"masks are not applied: write {UNLABELED} for labels of masked residues, and"


@dataclass(frozen=True)
class Example:
    """A protein with its label, or a letter for each residue; empty is unknown."""

    identifier: str
    sequence: str
    label: str
    split: str = ""
    cluster: str = ""
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class LabeledProteins:
    """The examples of a file, and whether their labels are of residues.

    `left_out` and `changed` count rows and sequences by reason.
    """

    examples: list[Example]
    per_residue: bool
    left_out: Mapping[str, int]
    changed: Mapping[str, int] = field(default_factory=dict)

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
    column: str | None = None,
    per_residue: bool = False,
) -> LabeledProteins:
    """Reads a table or a FASTA file of labels; rows without one or a sequence are left out.

    A FASTA file without TARGET= in its headers has labels of residues, and needs `sequences`.
    """
    text = read_text(path, "a file of labels")
    if text.lstrip().startswith(">"):
        if column is not None or (per_residue and "TARGET=" in text):
            raise UserError(
                f"{path} is a FASTA file, whose labels are TARGET= in the headers, or letters of "
                "residues in place of these; leave --label and --per-residue out"
            )
        per_residue = "TARGET=" not in text
        _check_fasta(path, text, per_residue=per_residue, has_sequences=sequences is not None)
        rows = _fasta_rows(path, text, per_residue=per_residue)
    else:
        rows = _table_rows(path, column, per_residue=per_residue)
    rows = list(rows)
    counts, tally = Counter[str](), Tally()
    examples = list(_examples(rows, sequences, counts, tally, per_residue=per_residue))
    if any(one.split for one in examples):
        counts["without a split"] = sum(not one.split for one in examples)
        examples = [one for one in examples if one.split]
    if not examples:
        reasons = ", ".join(f"{n:,} {why}" for why, n in counts.items() if n)
        advice = "give a row, or in FASTA files TARGET= after a blank, for each protein"
        raise InputDataError(f"{path} has no labels ({reasons}); {advice}")
    _check_sequences(path, examples)
    left_out = {why: number for why, number in counts.items() if number}
    return LabeledProteins(examples, per_residue, left_out, tally.changed)


def _examples(
    rows: Sequence[Example],
    sequences: Path | None,
    counts: Counter[str],
    tally: Tally,
    *,
    per_residue: bool,
) -> Iterator[Example]:
    """Yields the usable rows with their sequences, and counts the others."""
    wanted = {name for one in rows for name in (one.identifier, accession(one.identifier))}
    found = None if sequences is None else _sequences(sequences, wanted)
    seen: set[str] = set()
    # Beside + or ++, - is a class.
    missing = MISSING - {"-" for one in rows if {*one.label} == {"+"}}
    for one in rows:
        if one.label in missing or not one.label.strip(UNLABELED):
            counts["without a label"] += 1
            continue
        if one.identifier in seen:
            raise InputDataError(
                f"{one.place}: {one.identifier} is repeated; remove one of the two"
            )
        seen.add(one.identifier)
        sequence, reason = _residues_of(one, found, sequences, tally)
        if reason:
            counts[f"with a rejected sequence ({reason})"] += 1
            continue
        if per_residue and len(one.label) != len(sequence):
            raise InputDataError(
                f"{one.place}: {len(one.label)} labels for the {len(sequence)} residues of "
                f"{one.identifier}; write one letter for each, {UNLABELED} where it is unknown"
            )
        yield replace(one, sequence=sequence)


def _residues_of(
    one: Example, found: Mapping[str, tuple[str, str]] | None, sequences: Path | None, tally: Tally
) -> tuple[str, str]:
    """Returns the sequence, and the reason why it is rejected or an empty string."""
    if found is not None:
        name = one.identifier if one.identifier in found else accession(one.identifier)
        if name not in found:
            raise InputDataError(f"{one.place}: {sequences} has no sequence of {one.identifier}")
        return found[name]
    if not one.sequence:
        raise UserError(f"{one.place} has no sequence; add a column sequence, or --sequences FASTA")
    return residues(one.sequence, tally, ReadOptions())


def _check_fasta(path: Path, text: str, *, per_residue: bool, has_sequences: bool) -> None:
    """Refuses what a FASTA file of labels has and protlm does not apply, or lacks."""
    if foreign := _FOREIGN.search(text):
        line = text.count("\n", 0, foreign.start()) + 1
        advice = f"{_MASK_ADVICE} remove MASK=" if foreign[1] == "MASK" else "pairs are not read"
        raise InputDataError(f"{path}, line {line}: the header has {foreign[1]}=; {advice}")
    mask = next((one for one in path.parent.glob("mask.fa*") if one.name != path.name), None)
    if per_residue and mask is not None:
        raise InputDataError(f"{path}: {_MASK_ADVICE} move {mask} to another folder")
    if per_residue and not has_sequences:
        raise UserError(
            f"{path}: the headers lack TARGET= and SET= (of labels of proteins: '>ID TARGET=class "
            "SET=train'); if the letters are labels of residues, type --sequences FASTA"
        )


def _check_sequences(path: Path, examples: Sequence[Example]) -> None:
    """Refuses labels that are the sequences themselves, and nucleotides."""
    same = sum(capitals(one.label) == one.sequence for one in examples)
    if 2 * same >= len(examples):
        raise InputDataError(
            f"{path}: {same:,} of {len(examples):,} labels are the sequences themselves; headers "
            "of labels of proteins need TARGET= and SET= ('>ID TARGET=class SET=train')"
        )
    letters = "".join(one.sequence for one in examples)
    if len(letters) >= _NUCLEOTIDE_LETTERS and {*letters} <= {*"ACGTUN"}:
        raise InputDataError(f"{path}: the sequences look like DNA or RNA; translate them first")


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


def _table_rows(path: Path, column: str | None, *, per_residue: bool) -> Iterator[Example]:
    given = [] if column is None else [column]
    names = (*_NAMES, *_LABELS, *_OTHERS, *given)
    columns, lines = read_table(path, "a table of labels", names)
    if masks := [one for one in columns if per_residue and "mask" in one.lower()]:
        raise InputDataError(f"{path} has the column {masks[0]}, and {_MASK_ADVICE} remove it")
    label = next((name for name in (given or _LABELS) if name in columns), None)
    if label is None:
        raise InputDataError(
            f"{path} has the columns {', '.join(columns)[:200]}, not {column or 'label'}; choose "
            "the column of the labels: --label COLUMN"
        )
    name = next((name for name in _NAMES if name in columns), None)
    if name is None and "sequence" not in columns:
        raise InputDataError(
            f"{path} has the columns {', '.join(columns)[:200]}; add a column identifier or "
            "sequence"
        )
    for line, row in lines:
        cells = {key: cell.strip() for key, cell in zip(columns, row, strict=True)}
        place = f"{path}, line {line}"
        yield Example(
            identifier=cells[name] if name else f"line {line}",
            sequence=cells.get("sequence", ""),
            label=cells[label],
            split=_split_of(cells, place),
            cluster=cells.get("cluster", ""),
            place=place,
        )


def _fasta_rows(path: Path, text: str, *, per_residue: bool) -> Iterator[Example]:
    header, number, letters = "", 0, []
    for line, content in enumerate([*text.splitlines(), ">"], start=1):
        if not content.startswith(">"):
            letters.append(content.strip())
            continue
        if header:
            yield _fasta_example(f"{path}, line {number}", header, "".join(letters), per_residue)
        header, number, letters = content[1:].strip(), line, []
        if not header and line <= len(text.splitlines()):
            raise InputDataError(f"{path}, line {line}: the header has no identifier")


def _fasta_example(place: str, header: str, letters: str, per_residue: bool) -> Example:
    keys = list(_KEY.finditer(header))
    ends = [*(key.start() for key in keys[1:]), len(header)]
    cells = {}
    for key, end in zip(keys, ends, strict=False):
        value = header[key.end() : end].strip()
        if key[1] in _ATTRIBUTES:
            cells[key[1].lower()] = value if key[1] == "TARGET" else value.partition(" ")[0]
    return Example(
        identifier=header.split()[0],
        sequence="" if per_residue else letters,
        label=letters if per_residue else cells.get("target", ""),
        split=_split_of(cells, place),
        cluster=cells.get("cluster", ""),
        place=place,
    )


def _split_of(cells: Mapping[str, str], where: str) -> str:
    """Returns the split from the columns or attributes split, set and validation."""
    given = cells.get("split", cells.get("set", ""))
    if given in MISSING:
        return ""
    split = _SPLITS.get(given.lower())
    if split is None:
        raise InputDataError(
            f"{where}: the split {given!r} is not one of {', '.join(_SPLITS)}; leave it empty to "
            "leave the protein out"
        )
    is_valid = _is_true(cells.get("validation", ""), where)
    return VALID if split == TRAIN and is_valid else split


def _is_true(given: str, where: str) -> bool:
    if given in MISSING or given.lower() in ("false", "0"):
        return False
    if given.lower() in ("true", "1"):
        return True
    raise InputDataError(f"{where}: validation {given!r} is not one of true, false, 1, 0")
