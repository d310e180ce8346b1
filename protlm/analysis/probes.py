"""Linear probes: logistic regressions on frozen embeddings.

Features are standardized. The strength of the L2 penalty, and for a model the layer, are chosen on
held-out groups of the examples to fit to; no group is on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from protlm.errors import InputDataError

INVERSE_PENALTIES = (0.01, 0.1, 1.0)
_HELD_OUT = 0.25
_RESAMPLES = 1000
_MAX_ITERATIONS = 500


@dataclass(frozen=True)
class Examples:
    """Examples that a probe is fitted to or tested on.

    Args:
        features: one matrix, dense or sparse, of shape [examples, width] for each candidate layer.
        labels: classes, int64 [examples].
        groups: units that are held out and resampled together, for instance the protein of a
            residue, int64 [examples].
    """

    features: Sequence[Any]
    labels: np.ndarray
    groups: np.ndarray


@dataclass(frozen=True)
class ProbeResult:
    """Predictions of the best probe for the test examples.

    Attributes:
        predicted: classes, int64 [examples].
        layer: index of the layer among the candidates.
        inverse_penalty: C of the regression.
    """

    predicted: np.ndarray
    layer: int
    inverse_penalty: float


def probe(fit: Examples, test: Examples, *, seed: int = 0) -> ProbeResult:
    """Fits a multinomial logistic regression, and predicts the classes of `test`.

    Raises:
        InputDataError: there are fewer than two groups or classes to fit to.
    """
    groups = np.unique(fit.groups)
    if len(groups) < 2 or len(np.unique(fit.labels)) < 2:
        raise InputDataError(
            f"a probe needs two proteins and two classes to fit to, and there are {len(groups)} "
            f"and {len(np.unique(fit.labels))}; give more"
        )
    num_held_out = min(max(round(_HELD_OUT * len(groups)), 1), len(groups) - 1)
    held_out = np.random.default_rng(seed).permutation(groups)[:num_held_out]
    is_held_out = np.isin(fit.groups, held_out)
    if len(np.unique(fit.labels[~is_held_out])) < 2:
        is_held_out = ~is_held_out
    scores: dict[tuple[int, float], float] = {}
    for layer, features in enumerate(fit.features):
        for penalty in INVERSE_PENALTIES:
            fitted = _fitted(features[~is_held_out], fit.labels[~is_held_out], penalty)
            right = fitted.predict(features[is_held_out]) == fit.labels[is_held_out]
            scores[layer, penalty] = float(right.mean())
    layer, penalty = max(scores, key=lambda key: scores[key])
    fitted = _fitted(fit.features[layer], fit.labels, penalty)
    return ProbeResult(fitted.predict(test.features[layer]), layer, penalty)


def _fitted(features: Any, labels: np.ndarray, inverse_penalty: float) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    regression = LogisticRegression(C=inverse_penalty, max_iter=_MAX_ITERATIONS)
    # Centering would make a sparse matrix dense.
    scaler = StandardScaler(with_mean=isinstance(features, np.ndarray))
    return make_pipeline(scaler, regression).fit(features, labels)


def class_scores(
    predicted: np.ndarray, labels: np.ndarray, groups: np.ndarray, *, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Returns the accuracy and the mean F1 of the classes, with bootstrap intervals.

    Args:
        predicted: classes, int64 [examples].
        labels: true classes.
        groups: units that are resampled together, 1,000 times.
        seed: seed of the resampling.

    Returns:
        {"accuracy" | "macro_f1": {"value", "low", "high"}}, the bounds of 95 % intervals.
    """
    num_classes = int(max(labels.max(), predicted.max())) + 1
    _, group_of = np.unique(groups, return_inverse=True)
    counts = np.zeros((group_of.max() + 1, num_classes, num_classes))
    np.add.at(counts, (group_of, labels, predicted), 1)
    drawn = np.random.default_rng(seed).integers(len(counts), size=(_RESAMPLES, len(counts)))
    resampled = np.stack([_from_confusion(counts[some].sum(axis=0)) for some in drawn])
    values = _from_confusion(counts.sum(axis=0))
    bounds = np.quantile(resampled, [0.025, 0.975], axis=0)
    return {
        name: {"value": float(value), "low": float(low), "high": float(high)}
        for name, value, low, high in zip(("accuracy", "macro_f1"), values, *bounds, strict=True)
    }


def _from_confusion(counts: np.ndarray) -> np.ndarray:
    """Returns accuracy and mean F1 of the classes that occur, from a confusion matrix."""
    right = np.diag(counts)
    either = counts.sum(axis=0) + counts.sum(axis=1)
    there = counts.sum(axis=1) > 0
    f1 = 2 * right[there] / either[there]
    return np.array([right.sum() / counts.sum(), f1.mean()])
