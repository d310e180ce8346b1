"""Sums over the residues of each sequence, and the figures that are made of them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protlm.analysis.bootstrap import percentiles, ratio_of
from protlm.data.tables import read_labels, write_table
from protlm.model.objective import perplexity
from protlm.system.errors import InputDataError

BASELINES = ("empirical", "three_mers")
# Smaller groups do not count in a mean over groups: one short protein would be worth hundreds.
FEWEST_IN_GROUP = 5


@dataclass(frozen=True)
class SequenceSums:
    """Sums over the targets of each sequence of a split, float64 [sequences] each."""

    targets: np.ndarray
    nats: np.ndarray
    correct: np.ndarray
    empirical_nats: np.ndarray
    empirical_correct: np.ndarray
    three_mers_nats: np.ndarray
    three_mers_correct: np.ndarray

    @classmethod
    def zeros(cls, number: int) -> "SequenceSums":
        return cls(*(np.zeros(number) for _ in range(7)))

    def of(self, rows: np.ndarray) -> "SequenceSums":
        return SequenceSums(*(values[rows] for values in vars(self).values()))

    def figures(self, predictor: str = "model") -> dict[str, float]:
        """Returns accuracy and perplexity of the model or of one of `BASELINES`."""
        prefix = "" if predictor == "model" else f"{predictor}_"
        nats, correct = (getattr(self, f"{prefix}{name}").sum() for name in ("nats", "correct"))
        return ratio(nats, correct, self.targets.sum())


def ratio(nats: float, correct: float, count: float) -> dict[str, float]:
    """Returns accuracy and perplexity from sums.

    >>> ratio(0.0, 3, 4)
    {'accuracy': 0.75, 'perplexity': 1.0}
    """
    return {"accuracy": correct / count, "perplexity": perplexity(nats, count)}


def separate(group: str) -> list[str]:
    """Returns the names in a cell of groups, each once.

    >>> separate("Pkinase, fn3,Pkinase,")
    ['Pkinase', 'fn3']
    """
    return list(dict.fromkeys(name.strip() for name in group.split(",") if name.strip()))


def most_frequent(groups: Sequence[str]) -> list[str]:
    """Returns one group for each sequence: of several, the one that most sequences have.

    >>> most_frequent(["fn3,fn3,Pkinase", "fn3,Pkinase", "Pkinase,"])
    ['Pkinase', 'Pkinase', 'Pkinase']
    """
    of_each = [separate(group) for group in groups]
    counts = Counter(name for names in of_each for name in names)
    return [max(names, key=counts.__getitem__) for names in of_each]


def groups_of(names: list[str], table: Path | None, column: str) -> tuple[list[str], int]:
    """Returns the group of each sequence, or its name, and the number without a group.

    Args:
        names: of the sequences of a split.
        table: with the columns `accession` and `column`; None: each is a group by itself.
        column: of the groups.
    """
    if table is None:
        return names, 0
    rows = read_labels(table, "accession", column)
    known = {accession: group for accession, group in rows.items() if separate(group)}
    without_group = sum(name not in known for name in names)
    if without_group == len(names):
        raise InputDataError(
            f"{table} has no {column} for any sequence of the split; choose another table or column"
        )
    return most_frequent([known.get(name, name) for name in names]), without_group


def intervals(sums: SequenceSums, group_of: Sequence[str], *, seed: int) -> dict[str, list[float]]:
    """Returns 95 % intervals of the model's accuracy and perplexity, by resampling whole groups."""
    _, numbers = np.unique(np.array(group_of), return_inverse=True)
    nats, correct, targets = (
        np.bincount(numbers, values) for values in (sums.nats, sums.correct, sums.targets)
    )
    drawn = ratio_of("nats", nats, targets, seed=seed).resampled
    accuracy = ratio_of("accuracy", correct, targets, seed=seed).interval("accuracy")
    return {
        "accuracy": [*accuracy],
        "perplexity": [*percentiles(np.exp(np.minimum(drawn, 700.0)))],
    }


def by_group(sums: SequenceSums, group_of: Sequence[str]) -> dict[str, Any]:
    """Returns the figures of each group with targets, and means over groups of five sequences.

    Groups have equal weights in `macro`, which counts them (`groups`) and is left out where none
    has five sequences or more. The mean of perplexities is the geometric one, that of nats.
    """
    names, numbers = np.unique(np.array(group_of), return_inverse=True)
    groups: dict[str, Any] = {}
    for number, name in enumerate(names.tolist()):
        some = sums.of(numbers == number)
        if targets := int(some.targets.sum()):
            groups[name] = {
                **{who: some.figures(who) for who in ("model", *BASELINES)},
                "targets": targets,
                "sequences": len(some.targets),
            }
    large = [one for one in groups.values() if one["sequences"] >= FEWEST_IN_GROUP]
    if not large:
        return {"by_group": groups}
    macro: dict[str, Any] = {"groups": len(large)}
    for who in ("model", *BASELINES):
        nats = [math.log(values[who]["perplexity"]) for values in large]
        macro[who] = {
            "accuracy": float(np.mean([values[who]["accuracy"] for values in large])),
            "perplexity": math.exp(float(np.mean(nats))),
        }
    return {"by_group": groups, "macro": macro}


def write_sums(path: Path, names: list[str], group_of: list[str], sums: SequenceSums) -> None:
    """Writes a table with the sums of each sequence."""
    rows = zip(names, group_of, *vars(sums).values(), strict=True)
    write_table(path, ("accession", "group", *vars(sums)), (list(map(str, row)) for row in rows))
