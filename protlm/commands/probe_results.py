"""The results of `protlm probe`: metrics for the terminal and as JSON, and predictions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from protlm import __version__
from protlm.data.tables import write_rows
from protlm.downstream.labels import LabeledProteins
from protlm.downstream.linear import probabilities
from protlm.downstream.probe_tables import comparison, metric_rows, scores_of
from protlm.downstream.probing import MODEL, Predictor, ProbeOptions
from protlm.downstream.splits import Leakage, Split
from protlm.downstream.tasks import Targets, Task, missing_in_test
from protlm.system.terminal import console, printable

RESULTS, PREDICTIONS = "results.json", "predictions.tsv"


@dataclass(frozen=True)
class Result:
    """A probe with everything that it was fitted to and compared with."""

    model_name: str
    model_hash: str
    proteins: LabeledProteins
    targets: Targets
    split: Split
    leakage: Leakage
    predictors: Mapping[str, Predictor]

    @property
    def sides(self) -> dict[str, int]:
        """The number of proteins of each split."""
        split = self.split
        return {"train": len(split.train), "valid": len(split.valid), "test": len(split.test)}


def print_result(result: Result) -> None:
    """Prints a row for each predictor, the comparison with the best baseline, and what leaks."""
    task = result.targets.task
    scores = scores_of(result.predictors, task)
    headings, *rows = metric_rows(scores)
    table = Table(*headings, box=SIMPLE)
    for row in rows:
        table.add_row(*row)
    out = console()
    out.print(table)
    classes = f" of {len(result.targets.classes)} classes" if result.targets.classes else ""
    lines = [
        f"task: {task}{classes}; proteins: "
        + ", ".join(f"{n:,} {side}" for side, n in result.sides.items() if n),
        comparison(scores),
    ]
    if left_out := result.proteins.left_out:
        lines.append("left out: " + ", ".join(f"{n:,} {why}" for why, n in left_out.items()))
    if leaks := result.leakage.describe(len(result.split.test)):
        lines.append(f"warning: {leaks}")
    if lacking := missing_in_test(result.targets, result.split.test):
        lines.append(f"warning: {lacking}")
    for line in lines:
        out.print(printable(line), highlight=False, markup=False)


def write_result(folder: Path, result: Result, options: ProbeOptions) -> None:
    """Writes all metrics and their intervals as JSON; undefined ones are null."""
    task = result.targets.task
    leaked = result.leakage
    content = {
        "model": result.model_name,
        "model_hash": result.model_hash,
        "protlm_version": __version__,
        "task": task,
        "classes": result.targets.classes,
        "proteins": result.sides,
        "rows": len(result.targets.values),
        "left_out": dict(result.proteins.left_out),
        "seed": options.seed,
        "test_proteins_with_relatives_to_fit_to": {
            "identical": leaked.identical,
            "same_cluster": leaked.same_cluster,
            "similar": leaked.similar,
        },
        **scores_of(result.predictors, task),
    }
    (folder / RESULTS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_predictions(folder: Path, result: Result) -> None:
    """Writes the labels and predictions of the test proteins, or of their residues."""
    targets, examples = result.targets, result.proteins.examples
    outputs = result.predictors[MODEL].outputs
    rows = np.flatnonzero(np.isin(targets.groups, result.split.test))
    places = _positions(targets)[rows]
    header = ["identifier", "position", "label", *output_columns(targets.classes)]
    with (folder / PREDICTIONS).open("w", encoding="utf-8", newline="") as file:
        is_residues = targets.places is not None
        table = [[name for name in header if is_residues or name != "position"]]
        found = output_cells(outputs, targets.task, targets.classes)
        for row, place, cells in zip(rows, places, found, strict=True):
            one = examples[targets.groups[row]]
            label = one.label[place - 1] if is_residues else one.label
            where = [str(place)] if is_residues else []
            table.append([one.identifier, *where, label, *cells])
        write_rows(file, "\t", table)


def _positions(targets: Targets) -> np.ndarray:
    """Returns the position of each row in its protein, from 1; 0 for whole proteins."""
    if targets.places is None:
        return np.zeros(len(targets.values), dtype=np.int64)
    return np.concatenate(targets.places) + 1


def output_columns(classes: list[str]) -> list[str]:
    """Returns the columns of `output_cells`."""
    return ["predicted", *(f"p({name})" for name in classes)] if classes else ["predicted"]


def output_cells(outputs: np.ndarray, task: Task, classes: list[str]) -> list[list[str]]:
    """Formats a number, or the predicted class, or classes with p ≥ 0.5, and all probabilities."""
    if task is Task.number:
        return [[f"{value:.6g}"] for value in outputs[:, 0]]
    found = probabilities(outputs, task)
    rows = []
    for row in found:
        if task is Task.several_classes:
            names = ";".join(classes[number] for number in np.flatnonzero(row >= 0.5))
        else:
            names = classes[int(row.argmax())]
        rows.append([names, *(f"{value:.4f}" for value in row)])
    return rows
