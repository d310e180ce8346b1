"""What is predicted: a number, a class or several of a protein; classes or numbers of residues."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from protlm.analysis.dssp import secondary_structure
from protlm.analysis.structures import Structure
from protlm.data.tables import number_meant, number_of
from protlm.downstream.label_files import LIST, UNLABELED
from protlm.downstream.residue_labels import items_of
from protlm.downstream.splits import Split
from protlm.options.labels import Task
from protlm.system.errors import InputDataError, UserError

SEPARATOR = LIST
# Integers with at most this many values are classes.
_MOST_INTEGER_CLASSES = 10


@dataclass(frozen=True)
class Targets:
    """Labels as numbers, and the protein of each of their rows; of residues, the labeled places.

    Values are float64 of numbers and int64 of classes, [examples] or [residues] of all labeled
    residues in order; bool [examples, classes] of several classes, which are sorted.
    """

    task: Task
    classes: list[str]
    values: np.ndarray
    groups: np.ndarray
    places: list[np.ndarray] | None = None

    def rows_of(self, proteins: np.ndarray) -> np.ndarray:
        """Returns the rows of `values` of these proteins, in order, int64."""
        return np.flatnonzero(np.isin(self.groups, proteins))


def guess_task(
    labels: Sequence[str],
    *,
    per_residue: bool,
    separator: str = SEPARATOR,
    places: Sequence[str] = (),
) -> Task:
    """Returns the kind of labels; `places` are the file and line of each, for messages.

    >>> guess_task(["0.5", "2"], per_residue=False)
    <Task.number: 'number'>
    >>> guess_task(["0", "1", "1", "unknown"], per_residue=False)
    <Task.one_class: 'class'>
    >>> guess_task(["nucleus", "nucleus;cytoplasm"], per_residue=False)
    <Task.several_classes: 'multi-label'>
    """
    if per_residue:
        return Task.residue_numbers if _are_lists(labels) else Task.residue_classes
    values = [value for label in labels if (value := number_of(label)) is not None]
    if len(values) == len(labels):
        return _task_of_numbers(values)
    if _are_numbers(labels, separator):
        row = next(row for row, label in enumerate(labels) if number_of(label) is None)
        is_list = "," in labels[row]
        raise InputDataError(
            f"{places[row] if places else 'labels'}: {labels[row]!r} is not a number (0-9, a point "
            f"and a hyphen, up to 1e100), and {len(values):,} of {len(labels):,} labels are; "
            f"write {number_meant(labels[row]) or 'one'} or leave it empty, or say that the labels "
            f"are classes{', or that commas separate classes' if is_list else ''}",
            {"task": "class", **({"separator": ","} if is_list else {})},
        )
    _refuse_lists(labels)
    if not any(separator in label for label in labels):
        return Task.one_class
    parts = [part for label in labels for part in label.split(separator)]
    numbers = [value for part in parts if (value := _meant(part, separator)) is not None]
    if len(numbers) == len(parts) and not all(value.is_integer() for value in numbers):
        raise InputDataError(
            f"labels such as {labels[0][:40]!r} are lists of numbers; give one for each protein, "
            "or say that they are classes",
            {"task": "multi-label"},
        )
    return Task.several_classes


def _task_of_numbers(values: Sequence[float]) -> Task:
    is_integer = all(value.is_integer() for value in values)
    few = len(set(values)) <= _MOST_INTEGER_CLASSES
    return Task.one_class if is_integer and few else Task.number


def _are_numbers(labels: Sequence[str], separator: str) -> bool:
    """Returns whether labels, not all of them plain numbers, seem to be meant as numbers."""
    # Such as 12% or 0,5 throughout, but not 7 TM, which may be classes.
    if not any(one[-1:].isalpha() or _meant(one, separator) is None for one in labels):
        return True
    meant = [_meant(label.lstrip("<>=~≤≥≈ "), separator) for label in labels]
    values = [value for value in meant if value is not None]
    is_most = 2 * len(values) >= len(labels) or len(set(values)) > _MOST_INTEGER_CLASSES
    # Two kinds or three, each of them twice on average, are classes.
    is_few = np.isfinite(values).all() and len(set(labels)) <= min(3, len(labels) / 2)
    return is_most and not is_few and _task_of_numbers(values) is Task.number


def _meant(label: str, separator: str) -> float | None:
    """Returns the number that a label such as 0,5, 3 nM, 1e400 or 1_000 means, or None."""
    typed = "" if separator in label else number_meant(label)
    try:
        return float(typed.rpartition(" ")[2] or label)
    except ValueError:
        return None


def _refuse_lists(labels: Sequence[str]) -> None:
    for label in labels:
        is_list = label[:1] + label[-1:] in ("[]", "{}") and len(items_of(label)) != 1
        if is_list or label[:2] in ("['", '["', "{'", "('"):
            raise InputDataError(
                f"the label {label[:40]!r} is a list as programs write it; write its classes "
                f"without brackets and quotes, separated by {SEPARATOR}"
            )


def refuse_many_classes(targets: Targets) -> None:
    """Refuses classes if none has two proteins, or over ten have fewer than two on average."""
    one, several = (targets.task is kind for kind in (Task.one_class, Task.several_classes))
    classes, number = len(targets.classes), len(targets.values)
    is_many = one and (classes == number or classes > max(_MOST_INTEGER_CLASSES, number / 2))
    if is_many or (several and targets.values.sum(axis=0).max() < 2):
        raise InputDataError(
            f"{number:,} labels would be {classes:,} classes, and one that is learned from a "
            "protein needs another one to be tested on; choose the column of the labels, or the "
            "task",
            {"column": "COLUMN", "task": "number or class"},
        )


def targets_of(
    labels: Sequence[str], task: Task, *, min_count: int = 1, separator: str = SEPARATOR
) -> Targets:
    """Converts labels to numbers; classes of fewer than `min_count` proteins are ignored."""
    if task is Task.several_classes:
        return _several(labels, min_count, separator)
    items, groups, places = [*labels], np.arange(len(labels)), None
    if task.of_residues:
        are_lists = _are_lists(labels)
        states = [label.split(LIST) if are_lists else label for label in labels]
        places = [np.flatnonzero([x != UNLABELED for x in one]) for one in states]
        items = [x for one in states for x in one if x != UNLABELED]
        groups = np.repeat(groups, [len(one) for one in places])
    values: list[Any] = [number_of(x) for x in items] if task.is_number else items
    if None in values:
        other = items[values.index(None)]
        classes = Task.residue_classes if task.of_residues else Task.one_class
        raise InputDataError(
            f"{other!r} is not a number; write {number_meant(other) or 'one'}, or say that the "
            "labels are classes",
            {"task": classes},
        )
    distinct = sorted({*values})
    if len(distinct) < 2:
        raise InputDataError(f"all labels are {distinct[0]}; give two or more that differ")
    if task.is_number:
        return Targets(task, [], np.array(values, dtype=np.float64), groups, places)
    place = {name: number for number, name in enumerate(distinct)}
    return Targets(task, distinct, np.array([place[x] for x in values]), groups, places)


def _are_lists(labels: Sequence[str]) -> bool:
    return any(LIST in label for label in labels)


def state_labels(structure: Structure) -> str:
    """Returns H, E or C for each residue, `?` where its backbone is not resolved."""
    states = secondary_structure(structure.backbone_L43, structure.sequence)
    is_resolved = np.isfinite(structure.backbone_L43.sum(axis=(1, 2))).tolist()
    return "".join(
        state if resolved else UNLABELED
        for state, resolved in zip(states, is_resolved, strict=True)
    )


def state_targets(
    fit: Sequence[Structure], test: Sequence[Structure]
) -> tuple[list[str], Targets, Split]:
    """Returns the sequences of both, the states of their residues, and who is in the test."""
    both = [*fit, *test]
    targets = targets_of([state_labels(one) for one in both], Task.residue_classes)
    rows = np.arange(len(both))
    split = Split(rows[: len(fit)], rows[:0], rows[len(fit) :], rows)
    return [one.sequence for one in both], targets, split


def missing_in_test(targets: Targets, proteins: np.ndarray) -> str | None:
    """Returns a sentence on classes that the test proteins, by their rows, lack, or None."""
    if not targets.classes:
        return None
    values = targets.values[np.isin(targets.groups, proteins)]
    is_several = targets.task is Task.several_classes
    present = np.flatnonzero(values.any(axis=0)) if is_several else np.unique(values)
    lacking = [name for n, name in enumerate(targets.classes) if n not in present]
    if not lacking:
        return None
    is_one = len(present) < 2 and not is_several
    effect = "so there is nothing to tell apart" if is_one else "which the metrics do not cover"
    return (
        f"the test proteins lack {len(lacking)} of {len(targets.classes)} classes "
        f"({', '.join(lacking)[:80]}), {effect}"
    )


def _several(labels: Sequence[str], min_count: int, separator: str) -> Targets:
    _refuse_lists(labels)
    sets = [{part.strip() for part in label.split(separator)} - {""} for label in labels]
    counts = Counter(name for one in sets for name in one)
    classes = sorted(name for name, number in counts.items() if number >= min_count)
    if not classes:
        raise UserError(
            f"no class has {min_count} proteins, and those of fewer are ignored",
            {"min_count": "NUMBER"},
        )
    column = {name: number for number, name in enumerate(classes)}
    table = np.zeros((len(sets), len(classes)), dtype=bool)
    for row, one in enumerate(sets):
        table[row, [column[name] for name in one if name in column]] = True
    return Targets(Task.several_classes, classes, table, np.arange(len(labels)))
