"""What `protlm probe` prints and writes: metrics, predictions, and the probe itself.

`probe.safetensors` has `weights` [D, outputs] and `bias` [outputs], float64, of features that are
not standardized, or the weights of two convolutions, `0.weight` [channels, D, 7], `0.bias`,
`2.weight` and `2.bias`; `probe.json` says what they predict, and from which layer of which model.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from protlm import __version__
from protlm.analysis.bootstrap import Metrics
from protlm.analysis.intervals import HEADING, finite_or_none, in_words, score_cells, shown
from protlm.checkpoints.checks import Artifact
from protlm.checkpoints.format import find_model, shipped_models
from protlm.data.tables import write_rows
from protlm.downstream.convolution import convolutions, convolved
from protlm.downstream.examples import Labeled
from protlm.downstream.label_files import LIST
from protlm.downstream.linear import LinearModel, probabilities
from protlm.downstream.metrics import LABEL_METRICS, caution
from protlm.downstream.probing import MODEL, SPARSE, FittedHead
from protlm.downstream.tasks import Targets, missing_in_test
from protlm.model.pretrained import PretrainedModel
from protlm.options.labels import ProbeOptions, Task
from protlm.system.errors import InputDataError, UserError
from protlm.system.json_file import from_json, write_json
from protlm.system.terminal import print_table

_COMPARED = ("over_best_baseline", "over_sparse_features")
RESULTS, PREDICTIONS = "results.json", "predictions.tsv"


@dataclass(frozen=True)
class Result:
    """A probe with everything that it was fitted to and compared with."""

    model_name: str
    identity: str
    labeled: Labeled
    predictors: Mapping[str, FittedHead]


def scores_of(predictors: Mapping[str, FittedHead], task: Task) -> dict[str, Any]:
    """Returns all metrics, choices and intervals, undefined ones as None.

    The model's first metric is compared with the highest of a baseline, and its sparse features'.
    """
    metric, scores = LABEL_METRICS[task][0], {name: one.scores for name, one in predictors.items()}
    baselines = [name for name in scores if name not in (MODEL, SPARSE)]
    best = max(baselines, key=lambda name: np.nan_to_num(scores[name].values[metric], nan=-1))
    over = {
        key: {"baseline": one, "metric": metric, **scores[MODEL].less(scores[one], metric)}
        for key, one in zip(_COMPARED, (best, SPARSE), strict=True)
        if one in scores
    }
    return {
        **over,
        "predictors": {
            name: {
                "metrics": one.scores.to_plain(),
                "by_test_set": {name: found.to_plain() for name, found in one.by_set.items()},
                "layer": one.layer,
                "penalty": one.penalty,
                "by_layer": {str(layer): finite_or_none(x) for layer, x in one.by_layer.items()},
            }
            for name, one in predictors.items()
        },
    }


def mean_over(folds: Mapping[str, Result]) -> dict[str, FittedHead]:
    """Returns the predictors with the means of their metrics over folds, and of the resamples."""
    found = {}
    for name, first in next(iter(folds.values())).predictors.items():
        scores = [one.predictors[name].scores for one in folds.values()]
        values = {key: float(np.mean([x.values[key] for x in scores])) for key in scores[0].values}
        left = {key: np.mean([x.left_out[key] for x in scores], 0) for key in scores[0].left_out}
        means = Metrics(values, np.mean([one.resampled for one in scores], axis=0), left_out=left)
        found[name] = replace(first, layer=None, penalty=None, by_layer={}, scores=means)
    return found


def metric_rows(scores: Mapping[str, Any], heading: str = "labels by") -> list[list[str]]:
    """Returns headings and a row for each predictor, of the value of `scores_of`."""
    predictors = scores["predictors"]
    first, *others = next(iter(predictors.values()))["metrics"]
    names = [metric.removeprefix(f"{first} ") for metric in others]
    rows = [[heading, first, HEADING, *names, "layer"]]
    for name, found in predictors.items():
        metrics = found["metrics"]
        values = (shown(metrics[other]["value"]) for other in others)
        layer = "" if found["layer"] is None else str(found["layer"])
        rows.append([name, *score_cells(metrics[first]), *values, layer])
    return rows


def comparison(scores: Mapping[str, Any]) -> str:
    """Returns what the model is compared with, in words, of the value of `scores_of`."""
    lines = []
    for over in (scores[key] for key in _COMPARED if key in scores):
        lines.append(
            f"{over['metric']} of the model minus that of {over['baseline']}: "
            f"{in_words(over, '+.3f')}"
        )
        if None not in (over["low"], over["high"]) and over["low"] <= 0 <= over["high"]:
            lines[-1] += ", which includes 0"
    return "; ".join(lines)


def described(labeled: Labeled) -> str:
    """Returns the task, and the number of proteins of each split."""
    targets = labeled.targets
    classes = f" of {len(targets.classes)} classes" if targets.classes else ""
    sides = ", ".join(f"{n:,} {side}" for side, n in labeled.split.sides().items() if n)
    return f"task: {targets.task}{classes}; proteins: {sides}"


def few_in_test(targets: Targets, proteins: np.ndarray) -> list[str]:
    """Returns a sentence if test proteins are few, or those that have or lack a class.

    Classes count where the metrics include AUROC and AUPRC.
    """
    if targets.task is not Task.several_classes and len(targets.classes) != 2:
        return caution(len(proteins), "test proteins")
    rows = targets.rows_of(proteins)
    values, groups = targets.values[rows], targets.groups[rows]
    has_class = values if values.ndim == 2 else values[:, None] == 1
    counts = [len({*groups[side]}) for one in has_class.T for side in (one, ~one)]
    return caution(min(counts), "test proteins of a class, or without it")


def print_result(result: Result) -> None:
    """Prints a row for each predictor, the comparison with the best baseline, and what leaks."""
    labeled, targets = result.labeled, result.labeled.targets
    scores, test = scores_of(result.predictors, targets.task), labeled.split.test
    headings, *rows = metric_rows(scores)
    notes = [described(labeled), comparison(scores), *few_in_test(targets, test)]
    if left_out := labeled.proteins.left_out:
        notes.append("left out: " + ", ".join(f"{n:,} {why}" for why, n in left_out.items()))
    for name, rows_of_set in labeled.split.test_sets.items():
        metric = LABEL_METRICS[targets.task][0]
        values = [
            f"{who} {shown(predictor.by_set[name].values[metric])}"
            for who, predictor in result.predictors.items()
            if name in predictor.by_set
        ]
        if values:
            notes.append(f"{name}, {len(rows_of_set):,} proteins: {metric} of {', '.join(values)}")
    warnings = labeled.leaks, missing_in_test(targets, test)
    notes += [f"warning: {sentence}" for sentence in warnings if sentence]
    print_table(headings, rows, notes)


def write_result(folder: Path, result: Result, options: ProbeOptions) -> None:
    """Writes the model and `content_of` as JSON."""
    write_json(
        folder / RESULTS,
        {"model": result.model_name, "identity": result.identity, **content_of(result, options)},
    )


def content_of(result: Result, options: ProbeOptions) -> dict[str, Any]:
    """Returns all metrics and their intervals as JSON; undefined ones are null."""
    labeled, leaked, task = result.labeled, result.labeled.leakage, result.labeled.targets.task
    return {
        "protlm_version": __version__,
        "task": task,
        "head": options.head,
        "classes": labeled.targets.classes,
        "proteins": labeled.split.sides(),
        "test_sets": {name: len(rows) for name, rows in labeled.split.test_sets.items()},
        "rows": len(labeled.targets.values),
        "left_out": dict(labeled.proteins.left_out),
        "masked_residues": dict(labeled.proteins.masked),
        "in_train_or_valid_and_test": list(labeled.proteins.in_both),
        "seed": options.seed,
        "test_proteins_with_relatives_to_fit_to": {
            "identical": leaked.identical,
            "same_cluster": leaked.same_cluster,
            "similar": leaked.similar,
        },
        **scores_of(result.predictors, task),
    }


def write_folds(folder: Path, column: str, folds: Mapping[str, Result]) -> None:
    """Writes the means over folds as JSON, and prints them; `fold-1` is that of the first name."""
    task = next(iter(folds.values())).labeled.targets.task
    scores = scores_of(mean_over(folds), task)
    write_json(folder / RESULTS, {"fold": column, "folds": list(folds), "task": task, **scores})
    headings, *rows = metric_rows(scores, f"mean of {len(folds)} folds by")
    labeled = {fold: result.labeled for fold, result in folds.items()}
    few = [
        f"fold {fold}: {sentence}"
        for fold, one in labeled.items()
        for sentence in few_in_test(one.targets, one.split.test)
    ]
    leaks = [f"warning: fold {fold}: {one.leaks}" for fold, one in labeled.items() if one.leaks]
    print_table(headings, rows, [comparison(scores), *few, *leaks])


def write_predictions(folder: Path, result: Result) -> None:
    """Writes the labels and predictions of the test proteins, or of their residues."""
    targets, examples = result.labeled.targets, result.labeled.proteins.examples
    outputs = result.predictors[MODEL].outputs
    rows = targets.rows_of(result.labeled.split.test)
    places = None if targets.places is None else np.concatenate(targets.places)
    values, classes = targets.values, targets.classes
    position = [] if places is None else ["position"]
    table = [["identifier", *position, "label", *output_columns(targets.classes)]]
    for row, cells in zip(rows, output_cells(outputs, targets.task, classes), strict=True):
        one = examples[targets.groups[row]]
        if places is None:
            label = one.label
            if values.ndim == 2:
                label = LIST.join(classes[n] for n in np.flatnonzero(values[row]))
            table.append([one.identifier, label, *cells])
        else:
            label = classes[values[row]] if classes else f"{values[row]:g}"
            table.append([one.identifier, str(places[row] + 1), label, *cells])
    with (folder / PREDICTIONS).open("w", encoding="utf-8", newline="") as file:
        write_rows(file, "\t", table)


def output_columns(classes: list[str]) -> list[str]:
    """Returns the columns of `output_cells`."""
    return ["predicted", *(f"p({name})" for name in classes)] if classes else ["predicted"]


def output_cells(outputs: np.ndarray, task: Task, classes: list[str]) -> list[list[str]]:
    """Formats a number, or the predicted class, or classes with p ≥ 0.5, and all probabilities."""
    if task.is_number:
        return [[f"{value:.6g}"] for value in outputs[:, 0]]
    rows = []
    for row in probabilities(outputs, task):
        is_several = task is Task.several_classes
        taken = np.flatnonzero(row >= 0.5) if is_several else [int(row.argmax())]
        rows.append([";".join(classes[n] for n in taken), *(f"{value:.4f}" for value in row)])
    return rows


PROBE = Artifact("probe.safetensors", "probe.json", "a probe", "probe")


@dataclass(frozen=True)
class Probe:
    """A head on the states of a layer of a model, and what it predicts.

    The states are averaged over residues, except for labels of residues.
    """

    task: Task
    classes: list[str]
    layer: int
    identity: str
    fitted: LinearModel | nn.Sequential
    # The name of the model, or its path from the folder of the probe.
    model: str
    # The number of contexts over which states are averaged; 0 of proteins alone.
    contexts: int = 0

    def outputs(self, features: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """Returns numbers or logits of proteins, or of all residues of proteins of some lengths."""
        head = self.fitted
        if isinstance(head, LinearModel):
            return head.outputs(features)
        parts = np.split(features, np.cumsum(lengths)[:-1])
        return convolved(head, parts).detach().double().numpy()

    def find_model(self, folder: Path) -> Path:
        """Returns the model of a probe in this folder."""
        if (path := folder / self.model).exists():
            return path.resolve()
        if Path(self.model) not in (Path(one.name) for one in shipped_models()):
            raise UserError(
                f"{folder}: its model {self.model} is not there", {"model_path": "MODEL"}
            )
        return Path(self.model)

    def check_contexts(self, contexts: int) -> None:
        """Refuses another number of contexts than that of the fit."""
        if contexts != self.contexts:
            alone = "proteins alone", {"relatives": None}
            typed = {"relatives": "PATH", "contexts": self.contexts}
            fitted, typed = (
                (f"means over {self.contexts} contexts", typed) if self.contexts else alone
            )
            raise UserError(f"the probe was fitted to {fitted}, not to {contexts}", typed)

    def check_model(self, model: PretrainedModel) -> None:
        """Refuses another model than the one that the probe was fitted on."""
        if model.identity != self.identity:
            raise UserError(
                "the probe was fitted on a model with other weights or settings; give the same "
                "model, or none",
                {"model_path": None},
            )
        head, width = self.fitted, model.description.model.model_dim
        own = len(head.weights) if isinstance(head, LinearModel) else head[0].in_channels
        if not 0 <= self.layer <= model.num_layers or own != width:
            raise InputDataError(
                "the probe is damaged: its layer or its width does not fit its model, with "
                f"layers 0 to {model.num_layers} and {width} features"
            )


def name_of_model(model: Path, folder: Path) -> str:
    """Returns the name of a model, or its path from a folder, so that both can be moved."""
    if (shipped := find_model(model)) in shipped_models():
        return shipped.name
    return os.path.relpath(model.resolve(), folder.resolve()) if model.exists() else str(model)


def write_probe(folder: Path, probe: Probe) -> None:
    """Writes the files of a probe into a folder, and the checksums of all files in it."""
    head = probe.fitted
    if isinstance(head, LinearModel):
        arrays = {"weights": head.weights.copy(order="C"), "bias": head.bias}
        weights = {name: torch.from_numpy(one) for name, one in arrays.items()}
    else:
        weights = head.state_dict()
    PROBE.write(folder, weights, {key: x for key, x in vars(probe).items() if key != "fitted"})


def read_probe(folder: str | Path) -> Probe:
    """Reads a probe."""
    content, arrays = PROBE.read(Path(folder))
    try:
        found = from_json(Probe, {**content, "fitted": None})
        outputs = len(found.classes) or 1
        if "bias" in arrays:
            fitted = LinearModel(arrays["weights"].numpy(), arrays["bias"].numpy())
            if fitted.weights.shape[1:] != (outputs,) or fitted.bias.shape != (outputs,):
                raise ValueError(f"it does not have {outputs} outputs")
        else:
            fitted = convolutions(arrays["0.weight"].shape[1], outputs)
            fitted.load_state_dict(arrays)
    except (KeyError, RuntimeError, ValueError) as error:
        raise InputDataError(
            f"{folder} is not a probe: {' '.join(str(error).split())[:200]}"
        ) from error
    return replace(found, fitted=fitted)
