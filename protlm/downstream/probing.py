"""Linear probes: labels predicted from frozen embeddings, beside baselines without the model.

The layer, then the penalty, are chosen on the split `valid`, or without one on a fifth of the
training groups. The probe is then fitted to `train` and `valid`, and tested on `test`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from protlm.analysis.bootstrap import MODEL, RANDOM, Metrics
from protlm.config.data import TOKENS_PER_BATCH
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.downstream.linear import LinearModel, constant, fit, penalties_of
from protlm.downstream.metrics import label_scores
from protlm.downstream.splits import Split, held_out
from protlm.downstream.tasks import Targets, Task
from protlm.model.embedding import embeddings
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError

CONSTANT = "constant"
_HELD_OUT = 0.2
# What the layer and the penalty are chosen by.
_CHOSEN_BY = {Task.number: "R2", Task.residue_numbers: "R2", Task.several_classes: "AUROC"}


@dataclass(frozen=True)
class Predictor:
    """A fitted linear model, its choices, and its scores and outputs on the test proteins.

    A baseline has no layer, and the constant no penalty; `by_layer` is of the held-out proteins,
    `by_set` of each of several test sets.
    """

    fitted: LinearModel
    layer: int | None
    penalty: float | None
    by_layer: Mapping[int, float]
    scores: Metrics
    outputs: np.ndarray
    by_set: Mapping[str, Metrics] = field(default_factory=dict)


@dataclass(frozen=True)
class ProbeOptions:
    """The settings of a probe; no layers means all, from 0, the embedding, to the last."""

    layers: tuple[int, ...] = ()
    tokens_per_batch: int = TOKENS_PER_BATCH
    seed: int = 0


def probe(
    model: PretrainedModel,
    sequences: Sequence[str],
    targets: Targets,
    split: Split,
    options: ProbeOptions,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Predictor]:
    """Fits and tests the probe of the model, which is not trained, and of each baseline.

    `report` gets the name of each predictor before its work.
    """
    folds = {"": split}
    return probe_folds(model, sequences, targets, folds, options, report=report)[""]


def probe_folds(
    model: PretrainedModel,
    sequences: Sequence[str],
    targets: Targets,
    folds: Mapping[str, Split],
    options: ProbeOptions,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, Predictor]]:
    """Does the work of `probe` for several splits of the same proteins, which are embedded once."""
    rows = {fold: _Rows(targets, split, options.seed) for fold, split in folds.items()}
    found: dict[str, dict[str, Predictor]] = {fold: {} for fold in folds}
    for name, features_of, layers in _features(model, sequences, targets, options):
        report(name)
        for fold, one in rows.items():
            found[fold][name] = _probe(features_of(one), layers, targets, one, options.seed)
    return found


def probe_features(features: Any, targets: Targets, split: Split, *, seed: int = 0) -> Predictor:
    """Fits and tests the probe of given features, [rows of the labels, width]."""
    return _probe([features], [], targets, _Rows(targets, split, seed), seed)


class _Rows:
    """The rows of labels of each split: those of the proteins, or of their residues."""

    def __init__(self, targets: Targets, split: Split, seed: int) -> None:
        self.split, train, of = split, split.train, targets.rows_of
        self.fit = of(np.concatenate([split.train, split.valid]))
        self.test = of(split.test)
        values = targets.values[self.fit]
        if values.ndim == 1 and not np.ptp(values):
            one = targets.classes[values[0]] if targets.classes else values[0]
            raise InputDataError(f"all labels to fit to are {one}; give two or more that differ")
        if split.valid.size:
            self.chosen_on = of(split.valid)
            self.rest = of(train)
        else:
            is_out = held_out(split.groups[train], _HELD_OUT, seed=seed)
            self.chosen_on, self.rest = of(train[is_out]), of(train[~is_out])


def _features(
    model: PretrainedModel,
    sequences: Sequence[str],
    targets: Targets,
    options: ProbeOptions,
) -> Iterator[tuple[str, Callable[[_Rows], list[Any]], list[int]]]:
    """Yields the name of a predictor, and its features for all rows by candidate layer."""
    layers = list(options.layers) or list(range(model.num_layers + 1))
    size, places = options.tokens_per_batch, targets.places
    for name in (MODEL, RANDOM):
        one = model if name == MODEL else model.with_random_weights(options.seed)
        states = embeddings(one, sequences, layers=layers, tokens_per_batch=size, places=places)
        yield name, lambda _, states=states: states, layers
    if places is None:
        baselines = cache(lambda rows: protein_baselines(sequences, rows.fit))
        for name in ("composition", "three_mers", "length"):
            yield name, lambda rows, x=name: [baselines(rows)[x]], []
    else:
        for name, features in residue_baselines(sequences, places).items():
            yield name, lambda _, features=features: [features], []
    yield CONSTANT, lambda _: [], []


def _probe(
    features: list[Any], layers: list[int], targets: Targets, rows: _Rows, seed: int
) -> Predictor:
    task, values = targets.task, targets.values
    by_layer: dict[int, float] = {}
    if not features:
        best, layer, penalty = 0, None, None
        features = [np.zeros((len(values), 1))]
        fitted = constant(values[rows.fit], task, num_classes=len(targets.classes), width=1)
    else:
        best, penalty, found = _chosen(features, targets, rows)
        by_layer = dict(zip(layers, found, strict=False))
        layer = layers[best] if layers else None
        fitted = _fitted(features[best], targets, rows.fit, penalty)
    outputs = fitted.outputs(features[best][rows.test])
    scores, by_set = scores_of_test(outputs, targets, rows.split, seed=seed)
    return Predictor(fitted, layer, penalty, by_layer, scores, outputs, by_set)


def scores_of_test(
    outputs: np.ndarray, targets: Targets, split: Split, *, seed: int
) -> tuple[Metrics, dict[str, Metrics]]:
    """Returns the scores of outputs for the test proteins, and for each of several test sets."""
    test, sets = targets.rows_of(split.test), split.test_sets

    def scores(taken: np.ndarray) -> Metrics:
        rows = test[taken]
        values, groups = targets.values[rows], targets.groups[rows]
        clusters, some = split.clusters_of(groups), outputs[taken]
        return label_scores(some, values, groups, targets.task, clusters=clusters, seed=seed)

    is_in = {name: np.isin(test, targets.rows_of(one)) for name, one in sets.items()}
    by_set = {name: scores(taken) for name, taken in is_in.items()} if len(sets) > 1 else {}
    return scores(np.ones(len(test), dtype=bool)), by_set


def _chosen(features: list[Any], targets: Targets, rows: _Rows) -> tuple[int, float, list[float]]:
    """Returns the best layer at the middle penalty, its best penalty, and the layers' scores."""
    penalties = penalties_of(features[0], targets.task)
    middle = penalties[len(penalties) // 2]

    def score(layer: int, penalty: float) -> float:
        fitted = _fitted(features[layer], targets, rows.rest, penalty)
        return _choice_score(fitted.outputs(features[layer][rows.chosen_on]), targets, rows)

    by_layer = [score(layer, middle) for layer in range(len(features))]
    best = int(np.argmax(by_layer))
    by_penalty = {p: by_layer[best] if p == middle else score(best, p) for p in penalties}
    return best, max(by_penalty, key=lambda p: by_penalty[p]), by_layer


def _fitted(features: Any, targets: Targets, rows: np.ndarray, penalty: float) -> LinearModel:
    values, classes = targets.values[rows], len(targets.classes)
    return fit(features[rows], values, targets.task, num_classes=classes, penalty=penalty)


def _choice_score(outputs: np.ndarray, targets: Targets, rows: _Rows) -> float:
    """Returns the metric that layers and penalties are chosen by; an undefined one is lowest."""
    values, groups = targets.values[rows.chosen_on], targets.groups[rows.chosen_on]
    found = label_scores(outputs, values, groups, targets.task, resamples=0)
    value = found.values[_CHOSEN_BY.get(targets.task, "accuracy")]
    return -np.inf if np.isnan(value) else value


# Residues on either side in the window of the baseline.
_FLANK = 8
_FIRST, _LETTERS = int(VOCABULARY.residues[0]), len(VOCABULARY.residues)


def compositions(sequences: Sequence[str]) -> np.ndarray:
    """Returns the frequencies of the 20 amino acids and log(length), float32 [sequences, 21]."""
    features = np.zeros((len(sequences), len(STANDARD) + 1), dtype=np.float32)
    for row, sequence in enumerate(sequences):
        counts = np.bincount(_numbers(sequence), minlength=len(STANDARD))
        features[row, :-1] = counts[: len(STANDARD)] / max(len(sequence), 1)
        features[row, -1] = np.log(max(len(sequence), 1))
    return features


def three_mers(fit: Sequence[str], other: Sequence[str]) -> tuple[Any, Any]:
    """Returns TF-IDF of the 3-mers that occur in `fit`: two sparse matrices with rows of norm 1."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(
        analyzer="char", ngram_range=(3, 3), lowercase=False, sublinear_tf=True
    )
    return vectorizer.fit_transform(fit), vectorizer.transform(other)


def protein_baselines(sequences: Sequence[str], fit: Sequence[int] | np.ndarray) -> dict[str, Any]:
    """Returns features of all proteins by name; those of 3-mers occur in the rows `fit`."""
    composition = compositions(sequences)
    _, known = three_mers([sequences[row] for row in fit], sequences)
    return {"composition": composition, "three_mers": known, "length": composition[:, -1:]}


def residue_baselines(
    sequences: Sequence[str], places: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns one-hot features of residues, and of eight on either side, [residues, width]."""
    windows = []
    for sequence, where in zip(sequences, places, strict=True):
        letters = np.eye(_LETTERS, dtype=np.float32)[_numbers(sequence)]
        padded = np.pad(letters, ((_FLANK, _FLANK), (0, 0)))
        shifted = [padded[where + shift] for shift in range(2 * _FLANK + 1)]
        windows.append(np.concatenate(shifted, axis=1))
    around = np.concatenate(windows)
    return {
        "residues_around": around,
        "residue": around[:, _FLANK * _LETTERS : (_FLANK + 1) * _LETTERS],
    }


def _numbers(sequence: str) -> np.ndarray:
    return VOCABULARY.encode(sequence).astype(np.int64) - _FIRST
