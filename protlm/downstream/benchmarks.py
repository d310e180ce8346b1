"""The tasks of benchmarks, in the folders that their authors publish, and figures of known models.

`benchmarks.tsv` has a row for each task, or each folder of tables. Files are ends of paths without
suffix, and may have a split before (train=sampled); `beside` them are sequences, or a reference of
ProteinGym. `published.tsv` has figures of known models, as they are printed and as fractions.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from protlm.analysis.bootstrap import RESAMPLES, Metrics, draws
from protlm.analysis.intervals import SCORE
from protlm.analysis.structures import structure_files
from protlm.downstream.label_files import with_files
from protlm.downstream.metrics import by_selection, positions_of
from protlm.downstream.probing import MODEL, RANDOM
from protlm.downstream.variants import Assay, parse_sequence, read_reference
from protlm.options.labels import Form, Header, LabelOptions, Task
from protlm.system.errors import InputDataError, refuse_unknown

LESS = " - "
COLUMNS = ("task", "metric", "by", *SCORE, "proteins", "source")


@dataclass(frozen=True)
class BenchmarkTask:
    """Labels to probe, variants of an assay to score, or structures with contacts to predict."""

    name: str
    kind: str
    files: list[Path]
    reading: LabelOptions = field(default_factory=LabelOptions)
    assay: Assay | None = None
    # What it is compared by, if not by the first metric of its kind of label.
    metric: str = ""
    # The number of assays of its group in the reference.
    of: int = 1

    @property
    def group(self) -> str:
        """The data set of several splits, or the assays that are averaged."""
        return self.name.partition("/")[0]


def rows_of(name: str, benchmark: str = "") -> list[dict[str, str]]:
    """Returns the rows of a table of this folder, of a benchmark or of all."""
    with Path(__file__).with_name(f"{name}.tsv").open(encoding="utf-8", newline="") as file:
        return [
            row
            for row in csv.DictReader(file, delimiter="\t")
            if benchmark in ("", row["benchmark"])
        ]


def find(
    benchmark: str, folder: Path
) -> tuple[list[BenchmarkTask], dict[str, list[str]], list[str]]:
    """Returns the tasks whose files are in a folder, at any depth; what others lack; unknown files.

    Of several files with one end, the nearest to the folder is taken, and the others are unknown.
    """
    refuse_unknown("NAME", benchmark, {row["benchmark"] for row in rows_of("benchmarks")})
    if not folder.is_dir():
        raise InputDataError(
            f"{folder}: no such folder; give the one with the files of {benchmark}"
        )
    names = {path: f"/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*")}
    shown = sorted(
        (path for path, name in names.items() if path.is_file() and "/." not in name),
        key=lambda path: (len(path.parts), path),
    )
    tasks, missing = [], dict[str, list[str]]()
    for row in rows_of("benchmarks", benchmark):
        splits = {end: a + b for a, b, end in (x.rpartition("=") for x in row["files"].split())}
        ends = [*splits, *row["beside"].split()]
        found = {end: [x for x in shown if x.with_name(_stem(x)).match(end)] for end in ends}
        beside = found.get(row["beside"], [])[:1]
        if lacking := [end for end, some in found.items() if not some]:
            missing[row["task"]] = lacking
        elif row["kind"] == "contacts":
            tasks.append(BenchmarkTask(folder.resolve().name, "contacts", structure_files(folder)))
        elif "*" in row["files"]:
            some, lacking = _of_assays(row, found[row["files"]], beside)
            tasks += some
            missing |= lacking
        else:
            files = [found[end][0] for end in splits]
            typed = [f"{split}{found[end][0]}" for end, split in splits.items()]
            used = [*files, *beside, *files[0].parent.glob("mask.fa*")]
            tasks.append(
                BenchmarkTask(
                    row["task"],
                    row["kind"],
                    used,
                    _reading(row, typed, beside),
                    metric=row["metric"],
                )
            )
    if not tasks:
        raise InputDataError(f"{folder} has no whole task of {benchmark}: {lacks(missing)}")
    used = {path for task in tasks for path in task.files}
    return tasks, missing, [names[one][1:] for one in shown if one not in used]


def lacks(missing: Mapping[str, Sequence[str]]) -> str:
    """Returns what tasks lack, by the ends of the paths of files."""
    each = (f"{task} lacks the file {' and '.join(ends)}" for task, ends in missing.items())
    return shorten("; ".join(each), 400, placeholder=" ...")


def _stem(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).stem


def _of_assays(
    row: Mapping[str, str], found: list[Path], beside: list[Path]
) -> tuple[list[BenchmarkTask], dict[str, list[str]]]:
    """Returns a task for each table of an assay in the reference, and assays without a table."""
    assays, tasks = read_reference(beside[0]), []
    for name, path in {_stem(path): path for path in reversed(found)}.items():
        if name in assays:
            title, assay = f"{row['task']}/{name}", assays[name]
            files, reading = [path, *beside], _reading(row, [str(path)], [], assay.wild_type)
            tasks.append(BenchmarkTask(title, row["kind"], files, reading, assay, of=len(assays)))
    if lacking := sorted({*assays} - {task.name.partition("/")[2] for task in tasks}):
        return tasks, {f"{len(lacking):,} of {len(assays):,} tables of {row['task']}": lacking}
    return tasks, {}


def _reading(
    row: Mapping[str, str], typed: list[str], beside: list[Path], wild_type: str = ""
) -> LabelOptions:
    def positions(variants: Sequence[str]) -> list[int]:
        return positions_of([parse_sequence(one, wild_type) for one in variants])[:, 0].tolist()

    label, header, fold = (row[name] or None for name in ("label", "header", "fold"))
    _, form = with_files(
        typed, Form(label, (), Header(header) if header else None, fold, tuple(row["sets"].split()))
    )
    # Scores of assays, of which some have few values; those of a position resemble each other.
    task, cluster = (Task.number, positions) if fold else (None, None)
    apart, sequences = bool(row["apart"]), next(iter(beside), None)
    return LabelOptions(sequences, task, cluster=cluster, form=form, apart=apart)


def figure_of(scores: Mapping[str, Metrics], metric: str, proteins: int) -> dict[str, Any]:
    """Returns a metric of each predictor, and of the model less the best other one, as JSON."""
    others = [who for who in scores if who != MODEL]
    best = max(others, key=lambda who: np.nan_to_num(scores[who].values[metric], nan=-1))
    by = {who: one.to_plain()[metric] for who, one in scores.items()}
    less = {f"{MODEL}{LESS}{best}": scores[MODEL].less(scores[best], metric)}
    return {"metric": metric, "proteins": proteins, "by": {MODEL: by[MODEL], **less, **by}}


def average(
    figures: Mapping[str, dict[str, Any]], assays: Mapping[str, Assay], seed: int
) -> dict[str, Any]:
    """Returns the average over assays as ProteinGym defines it.

    The bootstrap draws proteins within each type of selection.
    """
    first, scores = next(iter(figures.values())), {}
    for who in (one for one in first["by"] if LESS not in one):
        # NaN for None.
        values = {name: np.float64(figure["by"][who]["value"]) for name, figure in figures.items()}
        groups = [np.array(one) for one in by_selection(values, assays).values()]
        means = [one[np.stack([*draws(len(one), seed=seed)])].mean(axis=1) for one in groups]
        if min(map(len, groups), default=0) < 2:
            means = [np.full(RESAMPLES, np.nan)]
        value = float(np.mean([one.mean() for one in groups])) if groups else np.nan
        scores[who] = Metrics({first["metric"]: value}, np.mean(means, axis=0)[:, None])
    known = [name for name, one in figures.items() if one["by"][MODEL]["value"] is not None]
    return figure_of(scores, first["metric"], len({assays[name].protein for name in known}))


def table(benchmark: str, found: Mapping[str, Mapping[str, dict[str, Any]]]) -> list[tuple]:
    """Returns the `COLUMNS` of all tasks, from `figure_of` by model and task.

    Published figures stand beside those of all assays, and of all proteins.
    """
    rows, published, (first, *others) = [], rows_of("published", benchmark), found
    for task, metric in ((task, one["metric"]) for task, one in found[first].items()):
        for model, figures in found.items():
            for who, value in figures[task]["by"].items():
                if model == first or who.startswith((MODEL, RANDOM)):
                    by = f"{who} of {model}" if others and who.startswith(RANDOM) else who
                    by = model + by.removeprefix(MODEL) if by.startswith(MODEL) else by
                    rows.append((task, metric, by, *value.values(), figures[task]["proteins"], ""))
        whole = all(some[task].get("complete", True) for some in found.values())
        for one in published if whole else ():
            if (one["task"], one["metric"]) == (task, metric):
                source = f"head: {one['head']}; {one['table']}, {one['address']}"
                value = (float(one["value"]), None, None, None, source)
                rows.append((task, metric, one["model"], *value))
    return rows
