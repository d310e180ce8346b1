"""Linear models of labels on features: ridge regression, and logistic regression of classes."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from protlm.options.labels import Task

# Of standardized features: lambda of ridge regression, and C of logistic regression.
PENALTIES = {
    **dict.fromkeys(Task, (0.001, 0.01, 0.1, 1.0)),
    **dict.fromkeys([Task.number, Task.residue_numbers], (1.0, 10.0, 100.0, 1_000.0, 10_000.0)),
}
# Of sparse features, of which only those of residues are scaled.
SPARSE_PENALTIES = {
    **dict.fromkeys(Task, (0.1, 1.0, 10.0, 100.0)),
    Task.number: (0.01, 0.1, 1.0, 10.0),
    Task.residue_classes: (1e-5, 1e-4, 0.001, 0.01),
    Task.residue_numbers: (100.0, 1_000.0, 1e4, 1e5),
}
_BLOCK = 16_384
_MAX_ITERATIONS = 300
_TOLERANCE = 1e-3
# TF-IDF is small, as is then the gradient at which the iterations end.
_SPARSE_TOLERANCE = 1e-6
# The logit of a class that no example has: its probability is 0.
NEVER = -1e4


@dataclass(frozen=True)
class LinearModel:
    """Outputs x · weights + bias: a number, or logits; of features not standardized, float64."""

    weights: np.ndarray
    bias: np.ndarray

    def outputs(self, features: Any) -> np.ndarray:
        """Returns numbers or logits, float64 [examples, outputs]."""
        found = np.empty((features.shape[0], len(self.bias)))
        # The product makes float64 of other numbers.
        for start in range(0, len(found), _BLOCK):
            found[start : start + _BLOCK] = features[start : start + _BLOCK] @ self.weights
        return found + self.bias


def probabilities(logits: np.ndarray, task: Task) -> np.ndarray:
    """Returns the probability of each class: sigmoids of several classes, else a softmax.

    >>> probabilities(np.array([[0.0, 0.0]]), Task.one_class).tolist()
    [[0.5, 0.5]]
    """
    if task is Task.several_classes:
        return np.exp(-np.logaddexp(0, -logits))
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def penalties_of(features: Any, task: Task) -> tuple[float, ...]:
    """Returns the candidates for the penalty, in increasing order."""
    return (PENALTIES if isinstance(features, np.ndarray) else SPARSE_PENALTIES)[task]


def fit(
    features: Any, values: np.ndarray, task: Task, *, num_classes: int, penalty: float
) -> LinearModel:
    """Fits a linear model to features, [examples, width]; dense ones are standardized.

    Sparse ones are not: a feature of few proteins would get a large weight.
    """
    from sklearn.linear_model import Ridge
    from sklearn.preprocessing import StandardScaler

    is_dense = isinstance(features, np.ndarray)
    scaler: Any = StandardScaler()
    scaled = scaler.fit_transform(features.astype(np.float64)) if is_dense else features
    if task.is_number:
        ridge: Any = Ridge(alpha=penalty).fit(scaled, values)
        weights, bias = ridge.coef_.reshape(-1, 1), np.atleast_1d(ridge.intercept_)
    elif task is Task.several_classes:
        columns = [_multinomial(scaled, column.astype(int), 2, penalty) for column in values.T]
        weights = np.stack([one[0][:, 1] for one in columns], axis=1)
        bias = np.array([np.diff(one[1])[0] for one in columns])
    else:
        weights, bias = _multinomial(scaled, values, num_classes, penalty)
    if not is_dense:
        return LinearModel(weights, bias)
    weights = weights / scaler.scale_[:, None]
    return LinearModel(weights, bias - scaler.mean_ @ weights)


def _multinomial(
    scaled: Any, values: np.ndarray, num_classes: int, penalty: float
) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.linear_model import LogisticRegression

    weights, bias = np.zeros((scaled.shape[1], num_classes)), np.full(num_classes, NEVER)
    seen = np.unique(values)
    if len(seen) == 1:
        bias[seen] = 0
        return weights, bias
    tolerance = _TOLERANCE if isinstance(scaled, np.ndarray) else _SPARSE_TOLERANCE
    fitted: Any = LogisticRegression(C=penalty, max_iter=_MAX_ITERATIONS, tol=tolerance)
    fitted.fit(scaled, values)
    if len(seen) == 2:
        # Of two classes, scikit-learn has the logit of the second one.
        bias[seen[0]] = 0
        seen = seen[1:]
    weights[:, seen], bias[seen] = fitted.coef_.T, fitted.intercept_
    return weights, bias


def trainable(
    fitted: LinearModel, values: np.ndarray, task: Task, *, num_classes: int
) -> LinearModel:
    """Returns a model to be trained further, which is certain of no class.

    A class that all or none of the examples have gets its smoothed frequency, as in `constant`: a
    logit of -10,000 has no gradient, and would be all of a loss on examples that have the class.
    """
    if task.is_number:
        return fitted
    usual = constant(values, task, num_classes=num_classes, width=len(fitted.weights)).bias
    is_certain = np.abs(fitted.bias) >= -NEVER
    return LinearModel(fitted.weights, np.where(is_certain, usual, fitted.bias))


def constant(values: np.ndarray, task: Task, *, num_classes: int, width: int) -> LinearModel:
    """Returns the model that ignores the features: the mean, or the frequencies of classes."""
    if task.is_number:
        bias = values.mean(keepdims=True)
    else:
        counts = np.bincount(values, minlength=num_classes) if values.ndim == 1 else values.sum(0)
        frequencies = (counts + 0.5) / (len(values) + 1)
        odds = frequencies / (1 - frequencies) if values.ndim == 2 else frequencies
        bias = np.log(odds)
    return LinearModel(np.zeros((width, len(bias))), bias)
