"""Contact precision by group of structures, for instance with and without homologs in training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from protlm.analysis.label_tables import read_labels
from protlm.analysis.precision import DIVISORS, scores
from protlm.analysis.structures import Structure, contact_map
from protlm.errors import InputDataError

ALL = "all"
NEAREST = "nearest_in_sequence"


def read_groups(path: Path | None, structures: Sequence[Structure]) -> list[str] | None:
    """Reads the group of each structure from a table; None without a table.

    Raises:
        InputDataError: the table cannot be read, or a structure is not in it.
    """
    if path is None:
        return None
    group_of: dict[str, str] = {}
    for name, group in read_labels(path, ("structure", "group")):
        group_of[name] = group
    if missing := [s.identifier for s in structures if s.identifier not in group_of]:
        raise InputDataError(
            f"{path} has no group for {missing[0]}, and {len(missing) - 1} more are missing; add a "
            "row for each structure"
        )
    return [group_of[structure.identifier] for structure in structures]


def nearest_in_sequence(structures: Sequence[Structure]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns, without a model, pairs ranked by nearness in the sequence, and their contacts.

    Contacts become rarer with the separation, so of any range the nearest pairs are above chance.
    """
    found = []
    for structure in structures:
        positions = np.arange(len(structure.sequence), dtype=np.float64)
        found.append((-np.abs(positions[:, None] - positions), contact_map(structure)))
    return found


def scores_by_group(
    proteins: Sequence[tuple[np.ndarray, np.ndarray]], group_of: list[str] | None, *, seed: int
) -> dict[str, Any]:
    """Returns the `scores` of all proteins under `ALL`, and of each group under its name."""
    found = {ALL: scores(proteins, seed=seed)}
    for group in sorted(set(group_of or ())):
        members = [p for p, name in zip(proteins, group_of or (), strict=True) if name == group]
        found[group] = scores(members, seed=seed)
    return found


def by_predictor(figures: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns plain results: scores by predictor, and `by_group` where there are groups."""
    result: dict[str, Any] = {who: found[ALL] for who, found in figures.items()}
    groups = [name for name in next(iter(figures.values())) if name != ALL]
    if groups:
        result["by_group"] = {
            group: {who: found[group] for who, found in figures.items()} for group in groups
        }
    return result


def table_rows(values: Mapping[str, Any], predictors: Sequence[str]) -> list[tuple[str, ...]]:
    """Formats predictor, range, precisions and number of proteins, for all and for each group."""
    parts = {"": values, **{f", {g}": v for g, v in values.get("by_group", {}).items()}}
    rows = []
    for suffix, part in parts.items():
        for who in predictors:
            for separation, by_divisor in part[who].items():
                cells = [f"{by_divisor[divisor]['mean']:.1%}" for divisor in DIVISORS]
                count = str(by_divisor["P@L"]["count"])
                rows.append((f"{who}{suffix}", separation, *cells, count))
    return rows
