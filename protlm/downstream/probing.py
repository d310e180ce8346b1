"""Probes: labels predicted from frozen embeddings, beside baselines without the model.

The layer, then the penalty, are chosen on the split `valid`, or without one on a fifth of the
training groups. The probe is then fitted to `train` and `valid`, and tested on `test`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from scipy.sparse import vstack
from torch import nn

from protlm.analysis.bootstrap import MODEL, RANDOM, Metrics
from protlm.analysis.features.autoencoder import SparseAutoencoder
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.downstream.convolution import convolved, fit_convolutions
from protlm.downstream.linear import LinearModel, constant, fit, penalties_of
from protlm.downstream.metrics import label_scores
from protlm.downstream.splits import Split, held_out
from protlm.downstream.streaming import fit_residues
from protlm.downstream.tasks import Targets
from protlm.model.embedding import embeddings, forget
from protlm.model.pretrained import PretrainedModel
from protlm.model.vector_store import VectorStore
from protlm.options.labels import Head, ProbeOptions, Task
from protlm.system.errors import InputDataError, UserError
from protlm.system.terminal import watched

CONSTANT, SPARSE = "constant", "sparse_features"
_HELD_OUT = 0.2
# The model, its features, random weights, and at most four baselines.
_PREDICTORS = 7
# The penalty of the ridge regression by which the layer for classes of residues is chosen.
_RIDGE = 100.0
# What the layer and the penalty are chosen by.
_CHOSEN_BY = {Task.number: "R2", Task.residue_numbers: "R2", Task.several_classes: "AUROC"}


@dataclass(frozen=True)
class FittedHead:
    """A fitted head, its choices, and its scores and outputs on the test proteins.

    A baseline has no layer, and convolutions and the constant no penalty; `by_layer` is of the
    held-out proteins, `by_set` of each of several test sets.
    """

    fitted: LinearModel | nn.Sequential
    layer: int | None
    penalty: float | None
    by_layer: Mapping[int, float]
    scores: Metrics
    outputs: np.ndarray
    by_set: Mapping[str, Metrics] = field(default_factory=dict)


def probe(
    model: PretrainedModel,
    sequences: Sequence[str],
    targets: Targets,
    split: Split,
    options: ProbeOptions,
) -> dict[str, FittedHead]:
    """Fits and tests the probe of the model, which is not trained, and of each baseline."""
    return probe_folds(model, sequences, targets, {"": split}, options, quiet=True)[""]


def probe_folds(
    model: PretrainedModel,
    sequences: Sequence[str],
    targets: Targets,
    folds: Mapping[str, Split],
    options: ProbeOptions,
    *,
    quiet: bool = False,
    store: VectorStore | None = None,
) -> dict[str, dict[str, FittedHead]]:
    """Does the work of `probe` for several splits of the same proteins, which are embedded once.

    The means of proteins are kept in the `store`, if there is one.
    """
    rows_of = {fold: _Rows(targets, split, options.seed) for fold, split in folds.items()}
    heads: dict[str, dict[str, FittedHead]] = {fold: {} for fold in folds}
    features = _features(model, sequences, targets, options, store)
    for name, features_of, layers in watched(
        "predictors", features, total=_PREDICTORS, quiet=quiet
    ):
        for fold, rows in rows_of.items():
            heads[fold][name] = _probe(features_of(rows), layers, targets, rows, options.seed)
    return heads


def probe_features(features: Any, targets: Targets, split: Split, *, seed: int = 0) -> FittedHead:
    """Fits and tests the probe of given features, [rows of the labels, width]."""
    return _probe([features], [], targets, _Rows(targets, split, seed), seed)


class _Rows:
    """The rows of labels of each split: those of the proteins, or of their residues.

    A layer and a penalty are fitted to `rest` and compared on `chosen_on`; the chosen ones are then
    fitted to `fit`, which is both, and tested on `test`.
    """

    def __init__(self, targets: Targets, split: Split, seed: int) -> None:
        self.split = split
        self.fit = targets.rows_of(np.concatenate([split.train, split.valid]))
        self.test = targets.rows_of(split.test)
        values = targets.values[self.fit]
        if values.ndim == 1 and not np.ptp(values):
            label = targets.classes[values[0]] if targets.classes else values[0]
            raise InputDataError(f"all labels to fit to are {label}; give two or more that differ")
        train, valid = split.train, split.valid
        if not valid.size:
            is_held_out = held_out(split.groups[train], _HELD_OUT, seed=seed)
            train, valid = train[~is_held_out], train[is_held_out]
        self.rest, self.chosen_on = targets.rows_of(train), targets.rows_of(valid)


def _features(
    model: PretrainedModel,
    sequences: Sequence[str],
    targets: Targets,
    options: ProbeOptions,
    store: VectorStore | None,
) -> Iterator[tuple[str, Callable[[_Rows], list[Any]], list[int]]]:
    """Yields the name of a predictor, a function of the rows, and its candidate layers.

    The function returns the features by layer. Convolutions get a list for each layer, of the
    features of all residues of each protein.
    """
    is_cnn, size, places = options.head is Head.cnn, options.tokens_per_batch, targets.places
    embed = partial(embeddings, tokens_per_batch=size, store=store)
    all_layers = range(model.num_layers + 1)
    layers = list(options.layers or (all_layers[-1:] if is_cnn else all_layers))
    if (autoencoder := options.autoencoder) is not None:
        autoencoder.settings.check(model)
        if options.in_contexts is not None:
            raise UserError("features are of proteins alone", {"features": None})
        if is_cnn:
            raise UserError("the head cnn reads hidden states, not features", {"features": None})
    if is_cnn:
        if places is None:
            raise UserError("the head cnn needs labels of residues", {"head": None})
        places = [np.arange(len(sequence)) for sequence in sequences]

    def divided(layers: list[np.ndarray]) -> list[Any]:
        ends = np.cumsum([*map(len, sequences)])[:-1]
        return [np.split(x, ends) for x in layers] if is_cnn else layers

    for name in (MODEL, RANDOM):
        # Random weights are made when those of the model are done.
        network = model if name == MODEL else model.with_random_weights(options.seed)
        # Those read a protein alone, as a baseline.
        relatives = options.in_contexts if name == MODEL else None
        states = embed(network, sequences, layers=layers, places=places, in_contexts=relatives)
        yield name, lambda _, states=states: divided(states), layers
        # Those of the next model are in other files.
        states.clear()
    if autoencoder is not None:
        sparse = _sparse_features(model, autoencoder, sequences, places, tokens_per_batch=size)
        yield SPARSE, lambda _: [sparse], [autoencoder.settings.layer]
    if places is None:
        baselines = cache(lambda rows: protein_baselines(sequences, rows.fit))
        for name in ("composition", "three_mers", "length"):
            yield name, lambda rows, x=name: [baselines(rows)[x]], []
    else:
        # Convolutions see the residues around by themselves.
        flanks = {"residue": 0} if is_cnn else {"residues_around": _FLANK, "residue": 0}
        for name, flank in flanks.items():
            features = residue_baseline(sequences, places, flank)
            yield name, lambda _, features=features: divided([features]), []
    yield CONSTANT, lambda _: [], []


def _sparse_features(
    model: PretrainedModel,
    autoencoder: SparseAutoencoder,
    sequences: Sequence[str],
    places: Sequence[np.ndarray] | None,
    *,
    tokens_per_batch: int,
) -> Any:
    """Returns the features of residues, sparse [residues, n], or their means, [sequences, n]."""
    read = places or [np.arange(len(one[: model.max_residues])) for one in sequences]
    (states,) = embeddings(
        model,
        sequences,
        layers=[autoencoder.settings.layer],
        tokens_per_batch=tokens_per_batch,
        places=read,
    )
    proteins = np.split(states, np.cumsum([*map(len, read)])[:-1])
    sparse = (autoencoder.features_of(torch.from_numpy(states)) for states in proteins)
    return vstack([*sparse]) if places else np.stack([one.mean(axis=0) for one in sparse])


def _probe(
    features: list[Any], layers: list[int], targets: Targets, rows: _Rows, seed: int
) -> FittedHead:
    """Fits the best layer and penalty of the features; without features, the constant."""
    task, values = targets.task, targets.values
    best, penalty, by_layer = 0, None, []
    if not features:
        fitted = constant(values[rows.fit], task, num_classes=len(targets.classes), width=1)
        outputs = fitted.outputs(np.zeros((len(rows.test), 1)))
    elif isinstance(features[0], list):
        best, by_layer, fitted, outputs = _convolutions(features, targets, rows, seed)
    else:
        best, penalty, by_layer = _chosen(features, targets, rows)
        (fitted,) = _fitted(features[best], targets, rows.fit, [penalty])
        outputs = fitted.outputs(features[best][rows.test])
    layer = layers[best] if layers else None
    # Baselines have no layers.
    chosen_by = dict(zip(layers, by_layer, strict=False))
    scores, by_set = scores_of_test(outputs, targets, rows.split, seed=seed)
    return FittedHead(fitted, layer, penalty, chosen_by, scores, outputs, by_set)


def scores_of_test(
    outputs: np.ndarray, targets: Targets, split: Split, *, seed: int
) -> tuple[Metrics, dict[str, Metrics]]:
    """Returns the scores of outputs for the test proteins, and for each of several test sets."""
    test = targets.rows_of(split.test)

    def scores(is_taken: np.ndarray) -> Metrics:
        rows = test[is_taken]
        values, groups = targets.values[rows], targets.groups[rows]
        return label_scores(
            outputs[is_taken],
            values,
            groups,
            targets.task,
            clusters=split.clusters_of(groups),
            seed=seed,
        )

    sets = split.test_sets if len(split.test_sets) > 1 else {}
    rows_of = {name: np.isin(test, targets.rows_of(proteins)) for name, proteins in sets.items()}
    by_set = {name: scores(is_taken) for name, is_taken in rows_of.items()}
    return scores(np.ones(len(test), dtype=bool)), by_set


def _chosen(features: list[Any], targets: Targets, rows: _Rows) -> tuple[int, float, list[float]]:
    """Returns the best layer at the middle penalty, its best penalty, and the layers' scores.

    The score for classes of residues is minus the mean square error of a ridge regression.
    """
    penalties = penalties_of(features[0], targets.task)
    middle = penalties[len(penalties) // 2]

    def scores(layer: int, candidates: Sequence[float]) -> list[float]:
        x = features[layer]
        models = _fitted(x, targets, rows.rest, candidates)
        return [_choice_score(model.outputs(x[rows.chosen_on]), targets, rows) for model in models]

    if targets.task is Task.residue_classes:
        by_layer = []
        y = np.eye(len(targets.classes))[targets.values[rows.chosen_on]]
        as_numbers = replace(targets, task=Task.residue_numbers)
        for x in features:
            (ridge,) = fit_residues(x, as_numbers, rows.rest, [_RIDGE])
            by_layer.append(-float(np.mean((ridge.outputs(x[rows.chosen_on]) - y) ** 2)))
            forget(x)
    else:
        by_layer = [scores(layer, [middle])[0] for layer in range(len(features))]
    best = int(np.argmax(by_layer))
    return best, penalties[int(np.argmax(scores(best, penalties)))], by_layer


def _convolutions(
    features: list[list[np.ndarray]], targets: Targets, rows: _Rows, seed: int
) -> tuple[int, list[float], nn.Sequential, np.ndarray]:
    """Returns the best layer, the layers' scores, and the head with its outputs for the test."""
    places, groups = targets.places or [], targets.groups
    to_fit, chosen_on = np.unique(groups[rows.rest]), np.unique(groups[rows.chosen_on])
    heads = [fit_convolutions(x, targets, to_fit, chosen_on, seed=seed) for x in features]
    losses = [loss for _, loss in heads]
    best = int(np.argmin(losses))
    head, proteins = heads[best][0], features[best]
    outputs = [
        convolved(head, [proteins[test]])[places[test]].detach().double()
        for test in np.unique(groups[rows.test])
    ]
    return best, [-loss for loss in losses], head, torch.cat(outputs).numpy()


def _fitted(
    features: Any, targets: Targets, rows: np.ndarray, penalties: Sequence[float]
) -> list[LinearModel]:
    if targets.places is not None:
        return fit_residues(features, targets, rows, penalties)
    x, y, num_classes = features[rows], targets.values[rows], len(targets.classes)
    return [fit(x, y, targets.task, num_classes=num_classes, penalty=one) for one in penalties]


def _choice_score(outputs: np.ndarray, targets: Targets, rows: _Rows) -> float:
    """Returns the metric that layers and penalties are chosen by; an undefined one is lowest."""
    values, groups = targets.values[rows.chosen_on], targets.groups[rows.chosen_on]
    scores = label_scores(outputs, values, groups, targets.task, resamples=0)
    value = scores.values[_CHOSEN_BY.get(targets.task, "accuracy")]
    return -np.inf if np.isnan(value) else value


# Residues on either side in the window of the baseline.
_FLANK = 8
_FIRST, _LETTERS = int(VOCABULARY.residues[0]), len(VOCABULARY.residues)


def compositions(sequences: Sequence[str]) -> np.ndarray:
    """Returns the frequencies of the 20 amino acids and log(length), float32 [sequences, 21]."""
    size = len(STANDARD)
    counts = [np.bincount(_numbers(one), minlength=size)[:size] for one in sequences]
    lengths = np.array([[max(len(one), 1)] for one in sequences]).reshape(-1, 1)
    shares = np.reshape(counts, (-1, size)) / lengths
    return np.hstack([shares, np.log(lengths)]).astype(np.float32)


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


def residue_baseline(
    sequences: Sequence[str], places: Sequence[np.ndarray], flank: int
) -> np.ndarray:
    """Returns one-hot letters of residues and of some on either side, uint8 [residues, width]."""
    windows = []
    for sequence, where in zip(sequences, places, strict=True):
        letters = np.eye(_LETTERS, dtype=np.uint8)[_numbers(sequence)]
        padded = np.pad(letters, ((flank, flank), (0, 0)))
        windows.append(np.hstack([padded[where + shift] for shift in range(2 * flank + 1)]))
    return np.concatenate(windows)


def _numbers(sequence: str) -> np.ndarray:
    return VOCABULARY.encode(sequence).astype(np.int64) - _FIRST
