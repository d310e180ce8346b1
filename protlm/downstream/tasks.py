"""What is predicted: a number, a class or several classes of a protein, or classes of residues."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from protlm.downstream.labels import UNLABELED
from protlm.errors import InputDataError, UserError

_SEPARATORS = (";", ",")
# Integers with at most this many values are classes.
_MOST_INTEGER_CLASSES = 10


class Task(StrEnum):
    """The kind of a label."""

    number = "number"
    one_class = "class"
    several_classes = "multi-label"
    residue_classes = "per-residue"


@dataclass(frozen=True)
class Targets:
    """Labels as numbers.

    Attributes:
        task: the kind of the labels.
        classes: their names, sorted; of numbers, none.
        values: float64 [examples] of numbers; int64 [examples] of classes, or [residues] of all
            labeled residues in order; bool [examples, classes] of several classes.
        groups: the number of the protein of each row of `values`, int64.
        places: the labeled residues of each protein, for residues only.
    """

    task: Task
    classes: list[str]
    values: np.ndarray
    groups: np.ndarray
    places: list[np.ndarray] | None = None

    def rows_of(self, proteins: np.ndarray) -> np.ndarray:
        """Returns the rows of `values` of these proteins, in order, int64."""
        return np.flatnonzero(np.isin(self.groups, proteins))


def guess_task(labels: Sequence[str], *, per_residue: bool) -> Task:
    """Returns the kind of labels.

    >>> guess_task(["0.5", "2"], per_residue=False)
    <Task.number: 'number'>
    >>> guess_task(["0", "1", "1"], per_residue=False)
    <Task.one_class: 'class'>
    >>> guess_task(["nucleus", "nucleus;cytoplasm"], per_residue=False)
    <Task.several_classes: 'multi-label'>
    """
    if per_residue:
        return Task.residue_classes
    values = [_number(label) for label in labels]
    if not any(math.isnan(value) for value in values):
        is_integer = all(value.is_integer() for value in values)
        few = len(set(values)) <= _MOST_INTEGER_CLASSES
        return Task.one_class if is_integer and few else Task.number
    return Task.several_classes if _separator(labels) else Task.one_class


def targets_of(labels: Sequence[str], task: Task, *, min_count: int = 1) -> Targets:
    """Converts labels to numbers.

    Args:
        labels: one for each protein.
        task: the kind of the labels.
        min_count: with several classes, those of fewer proteins are ignored.

    Raises:
        InputDataError: a label is not a number, or there are fewer than two classes.
    """
    each = np.arange(len(labels))
    if task is Task.number:
        values = np.array([_number(label) for label in labels])
        if (bad := np.flatnonzero(np.isnan(values))).size:
            raise InputDataError(
                f"the label {labels[bad[0]]!r} is not a number; type --task class, or correct it"
            )
        return Targets(task, [], values, each)
    if task is Task.one_class:
        classes = _at_least_two(sorted(set(labels)))
        number = {name: row for row, name in enumerate(classes)}
        return Targets(task, classes, np.array([number[one] for one in labels]), each)
    if task is Task.several_classes:
        return _several(labels, min_count)
    labeled = ([n for n, x in enumerate(one) if x != UNLABELED] for one in labels)
    places = [np.array(numbers, dtype=np.int64) for numbers in labeled]
    classes = _at_least_two(sorted(set("".join(labels)) - {UNLABELED}))
    number = {name: row for row, name in enumerate(classes)}
    found = [number[x] for one in labels for x in one if x != UNLABELED]
    groups = np.repeat(each, [len(place) for place in places])
    return Targets(task, classes, np.array(found), groups, places)


def missing_in_test(targets: Targets, proteins: np.ndarray) -> str | None:
    """Returns a sentence on classes that the test proteins lack, or None.

    Args:
        targets: the labels.
        proteins: the rows of the test proteins.
    """
    if not targets.classes:
        return None
    values = targets.values[np.isin(targets.groups, proteins)]
    is_several = targets.task is Task.several_classes
    present = np.flatnonzero(values.any(axis=0)) if is_several else np.unique(values)
    lacking = [name for n, name in enumerate(targets.classes) if n not in present]
    if not lacking:
        return None
    is_one = len(present) < 2 and not is_several
    effect = "so the metrics mean nothing" if is_one else "which the metrics do not cover"
    return (
        f"the test proteins lack {len(lacking)} of {len(targets.classes)} classes "
        f"({', '.join(lacking)[:80]}), {effect}"
    )


def _several(labels: Sequence[str], min_count: int) -> Targets:
    separator = _separator(labels) or _SEPARATORS[0]
    sets = [{part.strip() for part in label.split(separator)} - {""} for label in labels]
    counts = Counter(name for one in sets for name in one)
    classes = sorted(name for name, number in counts.items() if number >= min_count)
    if not classes:
        raise UserError(f"no class has {min_count} proteins; type a smaller --min-count")
    column = {name: number for number, name in enumerate(classes)}
    table = np.zeros((len(sets), len(classes)), dtype=bool)
    for row, one in enumerate(sets):
        table[row, [column[name] for name in one if name in column]] = True
    return Targets(Task.several_classes, classes, table, np.arange(len(labels)))


def _separator(labels: Sequence[str]) -> str | None:
    return next((s for s in _SEPARATORS if any(s in label for label in labels)), None)


def _at_least_two(classes: list[str]) -> list[str]:
    if len(classes) < 2:
        raise InputDataError(f"all labels are {classes[0]}; a probe needs two classes or more")
    return classes


def _number(label: str) -> float:
    try:
        value = float(label)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
