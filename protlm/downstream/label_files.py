"""The rows of files of labels: tables, and the FASTA files of FLIP, biotrainer and DeepLoc.

Dallago et al. 2021 (doi:10.1101/2021.11.09.467890): a table has the columns sequence, target, set
and validation; headers of FASTA files have SET=, TARGET= and VALIDATION=, and MASK= in those of
biotrainer; labels of residues are `TARGET=`, or letters in place of the sequence. Headers of
DeepLoc (Almagro Armenteros et al. 2017, doi:10.1093/bioinformatics/btx431) have a location and a
suffix for membrane, soluble or unknown in their second word, and `test` in the third one.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from protlm.data.tables import MISSING, SPLITS, read_table
from protlm.options.labels import Form
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import existing_file
from protlm.system.terminal import printable

UNLABELED = "?"
TRUTH = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
# Between classes of a protein, or numbers of its residues.
LIST = ";"
# `pred` are proteins without labels, to be predicted.
TRAIN, VALID, TEST, PRED = "train", "valid", "test", "pred"
FITTED = (TRAIN, VALID)
_SPLITS = SPLITS | {PRED: PRED}
# Columns as benchmarks and UniProt name them.
_NAMES = ("identifier", "accession", "id", "ACC", "sid", "PDB-chain", "Entry", "Entry Name")
_SEQUENCES = (
    *("sequence", "seq", "aa_seq", "seq_full", "input", "primary", "fasta", "mutated_sequence"),
)
_LABELS = ("label", "target")
_OTHERS = ("split", "set", "validation", "cluster")
_ATTRIBUTES = ("SET", "TARGET", "VALIDATION", "CLUSTER", "MASK")
# An attribute of a header ends at the next one or with the header, so a target may have spaces.
_KEY = re.compile(r"(?<!\S)(\w+)=")
_PAIRS = re.compile(r"^>.*[ \t]INTERACTOR=", re.MULTILINE)
SUFFIX = re.compile(r"-[MSU]$")
_TESTED = re.compile(r"^>\S+[ \t]+\S+[ \t]+(?:new_test_set|test)[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """A protein with its label, or that of each residue; empty is unknown.

    The split is `train`, `valid` or the name of a test set, and masks have the names of their
    columns.
    """

    identifier: str
    sequence: str
    label: str
    split: str = ""
    cluster: str = ""
    place: str = field(default="", compare=False)
    fold: str = ""
    masks: Mapping[str, str] = field(default_factory=dict, compare=False)
    is_named: bool = field(default=True, compare=False)


def table_rows(path: Path, form: Form, split: str) -> Iterator[Example]:
    """Yields the rows of a table, and those without a split in the split of the file."""
    given = [one for one in (*form.columns, form.fold, form.column) if one is not None]
    columns, lines = read_table(
        path, "a table of labels", (*_NAMES, *_SEQUENCES, *_LABELS, *_OTHERS, *given)
    )
    lost = [one for one in given if one not in columns]
    label = form.column or next((name for name in _LABELS if name in columns), None)
    name = next((name for name in _NAMES if name in columns), None)
    found = [name for name in _SEQUENCES if name in columns]
    if (is_lost := lost or not (label or form.columns)) or not (name or found):
        # As they are in the file.
        shown = ", ".join(filter(None, read_table(path, "a table of labels")[0]))[:200]
        if not is_lost:
            raise InputDataError(
                f"{path} has the columns {shown}; add a column identifier or sequence"
            )
        missing, option = lost[0] if lost else "label", "column"
        if lost and missing != form.column:
            option = "fold" if missing == form.fold else "columns"
        raise InputDataError(f"{path} has the columns {shown}, not {missing}", {option: "COLUMN"})
    if len(found) > 1 and found[0] != _SEQUENCES[0]:
        raise InputDataError(
            f"{path} has the columns {' and '.join(found)}; rename that of the sequences to "
            "sequence, or remove the other"
        )
    # Beside dssp3, `disorder` is 0 where nothing is resolved.
    masks = [one for one in columns if "mask" in one.lower()]
    masks += ["disorder"] if {"dssp3", "disorder"} <= {*columns} else []
    taken = {
        "identifiers": name,
        "sequences": found[0] if found else None,
        "labels": label,
        "splits": form.fold or next((one for one in ("split", "set") if one in columns), None),
    }
    shown = ", ".join(f"{what} from the column {one}" for what, one in taken.items() if one)
    print(printable(f"{path}: {shown}"), file=sys.stderr)
    prefix = f"{path.name} line" if form.others else "line"
    for line, row in lines:
        cells = {key: cell.strip() for key, cell in zip(columns, row, strict=True)}
        place = f"{path}, line {line}"
        yield Example(
            identifier=cells[name] if name else f"{prefix} {line}",
            sequence=cells[found[0]] if found else "",
            label=_label(cells, label, form, place),
            split=_split_of(cells, place, form, split),
            cluster=cells.get("cluster", ""),
            place=place,
            fold=cells[form.fold] if form.fold else "",
            masks={one: cells[one] for one in masks if one != label},
            is_named=name is not None,
        )


def _label(cells: Mapping[str, str], column: str | None, form: Form, place: str) -> str:
    if not form.columns:
        return cells[column or ""]
    values = {one: TRUTH.get(cells[one].lower()) for one in form.columns}
    if other := [one for one, value in values.items() if value is None]:
        raise InputDataError(
            f"{place}: {other[0]}, a column of labels, is {cells[other[0]]!r}, not 0 or 1, true or "
            "false"
        )
    # That of none of the classes is not a missing label.
    return LIST.join(one for one, value in values.items() if value) or LIST


def fasta_rows(
    path: Path, text: str, form: Form, split: str, *, letters_are_labels: bool
) -> Iterator[Example]:
    """Yields the records of a FASTA file, and those without a split in the split of the file."""
    if pair := _PAIRS.search(text):
        line = text.count("\n", 0, pair.start()) + 1
        raise InputDataError(f"{path}, line {line}: the header has INTERACTOR=; pairs are not read")
    if form.header is not None and _TESTED.search(text):
        split = split or TRAIN
    header, number, letters = "", 0, []
    lines = text.splitlines()
    for line, content in enumerate([*lines, ">"], start=1):
        if not content.startswith(">"):
            letters.append(content.strip())
            continue
        if header:
            place = f"{path}, line {number}"
            cells = _attributes(header, form, place)
            cells["label" if letters_are_labels else "sequence"] = "".join(letters)
            yield Example(
                identifier=header.split()[0],
                sequence=cells.get("sequence", ""),
                label=cells.get("label", ""),
                split=_split_of(cells, place, form, split),
                cluster=cells.get("cluster", ""),
                place=place,
                masks={"MASK=": cells["mask"]} if "mask" in cells else {},
            )
        header, number, letters = content[1:].strip(), line, []
        if not header and line <= len(lines):
            raise InputDataError(f"{path}, line {line}: the header has no identifier")


def _attributes(header: str, form: Form, place: str) -> dict[str, str]:
    cells = {}
    if form.header is not None:
        if len(words := header.split()) < 2:
            raise InputDataError(f"{place}: the header has no second word, the label")
        cells["label"] = SUFFIX.sub("", words[1]) if form.header == "location" else words[1]
        if _TESTED.match(f">{header}"):
            cells["set"] = TEST
    keys = list(_KEY.finditer(header))
    ends = [*(key.start() for key in keys[1:]), len(header)]
    for key, end in zip(keys, ends, strict=False):
        value = header[key.end() : end].strip()
        if key[1] == "TARGET":
            cells["label"] = value
        elif key[1] in _ATTRIBUTES:
            cells[key[1].lower()] = value.partition(" ")[0]
    return cells


def _split_of(cells: Mapping[str, str], where: str, form: Form, of_file: str) -> str:
    """Returns the split from the columns or attributes split, set and validation, or the file's."""
    given = cells.get("split", cells.get("set", ""))
    if given in MISSING:
        return of_file
    split = split_named(given, form.test_sets, where)
    if split in FITTED and of_file not in ("", *FITTED):
        raise InputDataError(
            f"{where}: the split is {given}, and the file is given as {of_file}; correct one"
        )
    typed = cells.get("validation", "")
    is_valid = False if typed in MISSING else TRUTH.get(typed.lower())
    if is_valid is None:
        raise InputDataError(f"{where}: validation {typed!r} is not one of true, false, 1, 0")
    return VALID if split == TRAIN and is_valid else split


def split_named(given: str, test_sets: Sequence[str], where: str) -> str:
    """Returns train, valid, pred, or a test set: `test`, with a number or a name, or a given one.

    >>> split_named("val", [], ""), split_named("training", [], ""), split_named("test1", [], "")
    ('valid', 'train', 'test1')
    """
    if given in test_sets or re.fullmatch(r"(?i)test[\w.-]+", given):
        return given
    split = _SPLITS.get(given.lower())
    if split is None:
        raise InputDataError(
            f"{where}: the split {given!r} is not one of {', '.join(_SPLITS)}; leave it empty to "
            "leave the protein out, or say that it is a test set",
            {"test_sets": given},
        )
    return split


def with_files(files: Sequence[str], form: Form) -> tuple[Path, Form]:
    """Returns the first file of labels, and the form with the splits and the other files."""
    (split, path), *others = named_files(files, several=len(files) > 1)
    for one in (path, *(other for _, other in others)):
        # A folder may be LMDB, which has its own refusal.
        if not one.is_dir():
            existing_file(one, "a file of labels")
    return path, replace(form, split=split, others=tuple(others))


def named_file(typed: str) -> tuple[str, Path]:
    """Returns the split and the path of SPLIT=FILE."""
    return named_files([typed], several=True)[0]


def named_files(typed: Sequence[str], *, several: bool) -> list[tuple[str, Path]]:
    """Returns the split and the path of files given as SPLIT=FILE, or named by their split.

    >>> named_files(["train=a.csv", "CASP12=b.csv", "x/validation.csv.gz"], several=True)[0]
    ('train', PosixPath('a.csv'))
    """
    found = []
    for one in typed:
        split, _, name = one.partition("=")
        if Path(one).exists() or not re.fullmatch(r"[\w.-]+", split) or not name:
            split, name = Path(one).name.partition(".")[0] if several else "", one
            if split and split.lower() not in _SPLITS:
                raise UserError(
                    f"{one} is not named by its split; type train={one}, valid={one} or, for a "
                    f"test set, test={one} or NAME={one}"
                )
        found.append((_SPLITS.get(split.lower(), split), Path(name)))
    return found
