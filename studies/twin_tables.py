"""Tables and curves of twins, from the logs of their runs and the sums of their evaluations."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from protlm.analysis.sequence_sums import FEWEST_IN_GROUP, SequenceSums, most_frequent
from studies.runs import validations
from studies.tables import markdown, rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINASE = "Pkinase"
# The end of the labels of longer runs, whose curves are dashed.
LONGER = ", longer"
_RESAMPLES = 1000
# Fewer groups have no interval.
_FEWEST_GROUPS = 5
# The units of differences, the factors to them, and their digits.
_UNITS = (("nats", 1, 4), ("accuracy, points", 100, 2))
_PREDICTORS = {"empirical": "residue frequencies", "three_mers": "3-mers"}


@dataclass(frozen=True)
class Column:
    """A column of the tables: proteins of a split, and how they are weighted.

    Attributes:
        title: the heading of the column.
        table: name of the file with the sums of each protein, in the folder of a run.
        kinases: whether to take the kinases of the split, all other proteins, or (None) both.
        by_family: whether families have equal weights, instead of residues; proteins without a
            family are left out, as are families of fewer than five proteins.
    """

    title: str
    table: str
    kinases: bool | None = None
    by_family: bool = False


@dataclass(frozen=True)
class Proteins:
    """Sums over the targets of each protein of a column, and its family (or accession)."""

    sums: SequenceSums
    group: np.ndarray


def read_column(folder: Path, column: Column) -> Proteins:
    """Reads the sums of the proteins of a column."""
    rows = [row for row in rows_of(folder / column.table) if _is_in(row, column)]
    families = most_frequent([row["group"] for row in rows])
    if column.by_family:
        sizes = Counter(families)
        kept = [number for number, name in enumerate(families) if sizes[name] >= FEWEST_IN_GROUP]
        rows, families = [rows[number] for number in kept], [families[number] for number in kept]
    fields = SequenceSums.__dataclass_fields__
    sums = SequenceSums(*(np.array([float(row[name]) for row in rows]) for name in fields))
    return Proteins(sums, np.array(families))


def _is_in(row: dict[str, str], column: Column) -> bool:
    if column.by_family and row["group"] == row["accession"]:
        return False
    families = [name.strip() for name in row["group"].split(",")]
    return column.kinases in (None, KINASE in families)


def by_group(proteins: Proteins, predictor: str = "model") -> np.ndarray:
    """Returns nats, correct predictions and targets of each group, float64 [3, groups]."""
    _, numbers = np.unique(proteins.group, return_inverse=True)
    prefix = "" if predictor == "model" else f"{predictor}_"
    names = (f"{prefix}nats", f"{prefix}correct", "targets")
    return np.stack([np.bincount(numbers, getattr(proteins.sums, name)) for name in names])


def rates(totals: np.ndarray, *, by_family: bool) -> np.ndarray:
    """Returns nats and correct predictions per target, from [..., 3, groups]: [..., 2]."""
    if by_family:
        return (totals[..., :2, :] / totals[..., 2:, :]).mean(axis=-1)
    summed = totals.sum(axis=-1)
    return summed[..., :2] / summed[..., 2:]


def difference(
    pairs: Sequence[tuple[Path, Path]], column: Column
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nats and accuracy by which the second of each pair is above the first, with bounds.

    Pairs are of seeds. The bootstrap draws seeds, and families (proteins where they have none).

    Returns:
        The differences [2], and the lower and upper bounds of their 95 % intervals; of fewer than
        five groups NaN.
    """
    proteins = [[read_column(one, column) for one in pair] for pair in pairs]
    if len({tuple(one.group) for pair in proteins for one in pair}) > 1:
        sys.exit(f"{column.title}: the runs were evaluated on different proteins or groups")
    both = np.array([[by_group(one) for one in pair] for pair in proteins])

    def above(seeds: np.ndarray, groups: np.ndarray) -> np.ndarray:
        first, second = np.moveaxis(both[seeds][..., groups], 1, 0)
        weights = {"by_family": column.by_family}
        return (rates(second, **weights) - rates(first, **weights)).mean(axis=0)

    generator, size = np.random.default_rng(0), both.shape[-1]
    value = above(np.arange(len(both)), np.arange(size))
    if size < _FEWEST_GROUPS:
        return value, np.full(2, np.nan), np.full(2, np.nan)
    draws = [
        above(generator.integers(len(both), size=len(both)), generator.integers(size, size=size))
        for _ in range(_RESAMPLES)
    ]
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    return value, low, high


def figures_table(
    runs: dict[tuple[str, ...], Path],
    hours: dict[tuple[str, ...], float],
    columns: Sequence[Column],
) -> str:
    """Perplexity and accuracy of runs, which are named by cells, and of the baselines."""
    heads = ("objective", "mechanism", "compared at", "seed", "hours")
    rows: list[Sequence[str]] = [(*heads, *(column.title for column in columns))]
    baselines: dict[tuple[str, str], Path] = {}
    for cells, folder in runs.items():
        found = [_figures(folder, column) for column in columns]
        rows.append((*cells, f"{hours[cells]:.2f}", *found))
        baselines |= {(cells[0], predictor): folder for predictor in _PREDICTORS}
    for (objective, predictor), folder in baselines.items():
        found = [_figures(folder, column, predictor) for column in columns]
        rows.append((objective, _PREDICTORS[predictor], "", "", "", *found))
    return markdown(rows)


def _figures(folder: Path, column: Column, predictor: str = "model") -> str:
    totals = by_group(read_column(folder, column), predictor)
    nats, accuracy = rates(totals, by_family=column.by_family)
    return f"{np.exp(nats):.2f} / {accuracy:.2%}"


def differences_table(
    pairs: Mapping[tuple[str, ...], Sequence[tuple[Path, Path]]], columns: Sequence[Column]
) -> str:
    """Differences of pairs of runs, which are named by cells: nats, and points of accuracy."""
    heads = ("objective", "compared at", "seeds", "")
    rows: list[Sequence[str]] = [(*heads, *(column.title for column in columns))]
    for cells, some in pairs.items():
        found = [difference(some, column) for column in columns]
        for index, (unit, scale, digits) in enumerate(_UNITS):
            scaled = [[f"{scale * x[index]:+.{digits}f}" for x in values] for values in found]
            shown = [v if low == "+nan" else f"{v} ({low} to {high})" for v, low, high in scaled]
            rows.append((*cells, str(len(some)), unit, *shown))
    return markdown(rows)


def curves(
    runs: dict[str, tuple[Path, float]],
    *,
    tokens_per_step: int,
    color: Callable[[str], tuple[float, ...]],
) -> "Figure":
    """Draws validation losses against tokens, and against time.

    Args:
        runs: the folder of each run by its label, and the time of its step.
        tokens_per_step: tokens of a step, of all runs.
        color: the color of a label.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for label, (folder, step_time) in runs.items():
        by_step = validations(folder)
        steps, losses = np.array(list(by_step)), list(by_step.values())
        style = {"color": color(label), "marker": "o", "markersize": 3, "label": label}
        style |= {"linestyle": "--" if label.endswith(LONGER) else "-"}
        left.plot(steps * tokens_per_step / 1e6, losses, **style)
        right.plot(steps * step_time / 3600, losses, **style)
    left.set_xlabel("million tokens")
    right.set_xlabel("hours of one thread")
    left.set_ylabel("validation loss (nats per residue)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    names = left.get_legend_handles_labels()
    figure.legend(*names, loc="outside upper center", ncols=3, frameon=False)
    return figure
