"""Metrics of predicted labels, with 95 % intervals by bootstrap over clusters.

Residues of a protein are drawn together, as are proteins of a cluster if clusters are known. AUROC
and AUPRC are averaged over the classes that have both positive and negative proteins. Matthews'
correlation of several classes is that of Gorodkin 2004 (doi:10.1016/j.compbiolchem.2004.09.006).
All are those of scikit-learn, except that metrics of constant labels are NaN, and not 0 or 1.
"""

from collections.abc import Callable

import numpy as np

from protlm.analysis.bootstrap import RESAMPLES, Metrics, draws
from protlm.downstream.score_metrics import spearman
from protlm.downstream.tasks import Task

METRICS = {
    Task.number: ("Spearman", "R2"),
    Task.one_class: ("accuracy", "macro F1", "MCC"),
    Task.several_classes: ("AUROC", "AUPRC"),
    Task.residue_classes: ("accuracy", "macro F1", "MCC", "accuracy per protein"),
}


def label_scores(
    outputs: np.ndarray,
    values: np.ndarray,
    groups: np.ndarray,
    task: Task,
    *,
    units: np.ndarray | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Metrics:
    """Compares outputs with labels.

    Args:
        outputs: numbers or logits, [examples, outputs].
        values: as in `Targets`.
        groups: the protein of each row.
        task: the kind of the labels.
        units: the cluster of each row, drawn together; None draws proteins.
        seed: seed of the resampling.
        resamples: the number of resamples.
    """
    _, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    _, unit_of = np.unique((groups if units is None else units)[first], return_inverse=True)
    number = int(unit_of.max()) + 1
    counts = [
        np.bincount(drawn, minlength=number)[unit_of]
        for drawn in draws(number, seed=seed, number=resamples)
    ]
    metrics = _metrics_of(outputs, values, group_of, task)
    found = metrics(np.array([np.ones(len(first)), *counts]))
    return Metrics(dict(zip(METRICS[task], found[0].tolist(), strict=True)), found[1:])


def _metrics_of(
    outputs: np.ndarray, values: np.ndarray, group_of: np.ndarray, task: Task
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function from weights of the proteins [resamples, proteins] to metrics."""
    if task is Task.number:
        return lambda weights: np.stack(
            [_of_numbers(outputs[:, 0], values, row[group_of]) for row in weights]
        )
    if task is Task.several_classes:
        return lambda weights: _of_several(outputs, values, weights[:, group_of])
    predicted, size = outputs.argmax(axis=1), outputs.shape[1]
    confusions = np.zeros((int(group_of.max()) + 1, size, size))
    np.add.at(confusions, (group_of, values, predicted), 1)
    per_residue = task is Task.residue_classes
    return lambda weights: _of_confusions(confusions, weights, per_residue=per_residue)


def _of_numbers(predicted: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    rows = np.repeat(np.arange(len(values)), weights.astype(np.int64))
    x, y = predicted[rows], values[rows]
    spread = ((y - y.mean()) ** 2).sum()
    r2 = 1 - ((y - x) ** 2).sum() / spread if spread else np.nan
    return np.array([spearman(y, x), r2])


def _of_confusions(confusions: np.ndarray, weights: np.ndarray, *, per_residue: bool) -> np.ndarray:
    table = np.tensordot(weights, confusions, axes=1)
    total = table.sum(axis=(1, 2))
    right = table.diagonal(axis1=1, axis2=2)
    true, predicted = table.sum(axis=2), table.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        # As in scikit-learn, also of classes that are predicted and have no label.
        f1 = np.where(true + predicted > 0, 2 * right / (true + predicted), np.nan)
        squares = total**2 - (true**2).sum(axis=1), total**2 - (predicted**2).sum(axis=1)
        covariance = right.sum(axis=1) * total - (true * predicted).sum(axis=1)
        mcc = covariance / np.sqrt(squares[0] * squares[1])
        # MCC is 0/0 for a constant prediction; 0 is the convention.
        mcc = np.where((squares[1] == 0) & (squares[0] > 0), 0, mcc)
    columns = [right.sum(axis=1) / total, np.nanmean(f1, axis=1), mcc]
    if per_residue:
        each = confusions.diagonal(axis1=1, axis2=2).sum(axis=1) / confusions.sum(axis=(1, 2))
        columns.append(weights @ each / weights.sum(axis=1))
    return np.stack(columns, axis=1)


def _of_several(outputs: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    found = [_areas(o, v, weights) for o, v in zip(outputs.T, values.T, strict=True)]
    areas = np.array(found)
    is_defined = ~np.isnan(areas)
    sums, counts = np.where(is_defined, areas, 0).sum(axis=0), is_defined.sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _areas(scores: np.ndarray, is_positive: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns AUROC and average precision of a class, [resamples, 2]; ties count half in AUROC.

    Average precision is Σ over thresholds of precision times the gain of recall.
    """
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
    weighted = weights[:, order]
    hits = np.cumsum(weighted * is_positive[order], axis=1)[:, ends]
    taken = np.cumsum(weighted, axis=1)[:, ends]
    gains = np.diff(hits, axis=1, prepend=0)
    misses = np.diff(taken - hits, axis=1, prepend=0)
    positives, negatives = hits[:, -1], taken[:, -1] - hits[:, -1]
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(taken > 0, hits / taken, 0)
        auroc = (misses * (hits - gains / 2)).sum(axis=1) / (positives * negatives)
        average = (gains * precision).sum(axis=1) / positives
    is_defined = (positives > 0) & (negatives > 0)
    return np.where(is_defined[:, None], np.stack([auroc, average], axis=1), np.nan)
