"""Linear models of labels of residues, fitted by passes over rows that may be in a file.

Ridge regression needs only sums. The loss of classes is that of scikit-learn's LogisticRegression;
L-BFGS minimizes it in the coordinates in which the bound of its Hessian (Böhning 1992,
doi:10.1007/BF00048682) is the identity, so that few passes suffice.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from torch import Tensor
from torch.nn import functional as F

from protlm.downstream.linear import NEVER, LinearModel
from protlm.downstream.tasks import Targets

# Rows of sums, and those whose features stay in a cache.
_BLOCK, _CACHED = 16_384, 2_048
# Features whose deviation is below 1e-5 of their mean are constant, but for rounding.
_CONSTANT = 1e-10


def fit_residues(
    features: Any, targets: Targets, rows: np.ndarray, penalties: Sequence[float]
) -> list[LinearModel]:
    """Fits to some rows of features, [residues, D], which are standardized, with each penalty.

    It is λ of ridge regression, where classes are one-hot if the task is to predict numbers, or C
    of classes: C · Σ cross-entropy + |w|² / 2 is minimized. Sparse features are densified by block.
    """
    size, one_hot = features.shape[1], np.eye(len(targets.classes))
    sums = np.zeros([1 + size + (len(one_hot) or 1)] * 2)
    for some in np.array_split(rows, len(rows) // _BLOCK + 1):
        y = targets.values[some]
        y = one_hot[y] if targets.classes else y[:, None]
        both = np.hstack([np.ones((len(some), 1)), _dense(features[some]), y])
        sums += both.T @ both
    mean = sums[0, 1:] / len(rows)
    covariance = sums[1:, 1:] / len(rows) - np.outer(mean, mean)
    mean, center = np.split(mean, [size])
    variance = covariance.diagonal()[:size]
    scale = np.sqrt(np.where(variance <= _CONSTANT * mean**2, 1, variance))
    x, y = np.split(covariance[:size] / scale[:, None], [size], axis=1)
    found, weights, logits = [], np.zeros((size, len(center))), center
    for penalty in penalties:
        if targets.task.is_number:
            weights = np.linalg.solve(x / scale + penalty / len(rows) * np.eye(size), y)
        else:
            # Of two classes, scikit-learn has one vector of weights: the difference of these two.
            shrink = (1 + (np.sum(center > 0) == 2)) / (penalty * len(rows))
            root = np.linalg.cholesky(x / (2 * scale) + shrink * np.eye(size))
            standard, start = (mean, scale, root), root.T @ weights
            weights, logits = _logistic(features, targets, rows, standard, center, shrink, start)
        raw = weights / scale[:, None]
        found.append(LinearModel(raw, logits - mean @ raw))
    return found


def _dense(features: Any) -> np.ndarray:
    return features.toarray() if issparse(features) else features


def _logistic(
    features: Any,
    targets: Targets,
    rows: np.ndarray,
    standard: tuple[np.ndarray, np.ndarray, np.ndarray],
    frequencies: np.ndarray,
    shrink: float,
    start: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weights of standardized features, and the logits at their mean.

    They are standardized by mean and deviation; the root of the bound of the Hessian makes the
    coordinates, in which the start is given.
    """
    mean, scale, root = map(torch.tensor, standard)
    labels = torch.tensor(targets.values)
    point = torch.tensor(np.pad(start, ((1, 0), (0, 0)))).requires_grad_()
    usual = torch.tensor(frequencies).log().clamp(min=NEVER)

    def model() -> tuple[Tensor, Tensor]:
        return torch.linalg.solve_triangular(root.T, point[1:], upper=True), usual + point[0]

    def loss() -> Tensor:
        optimizer.zero_grad()
        weights, logits = model()
        total = shrink / 2 * weights.square().sum()
        raw = weights / scale[:, None]
        # A product with a transposed matrix of few rows is several times as fast.
        found = raw.T, logits - mean @ raw
        given = [one.detach().float().contiguous().requires_grad_() for one in found]
        sums = [torch.zeros_like(one) for one in found]
        for some in np.array_split(rows, len(rows) // _CACHED + 1):
            states = torch.from_numpy(_dense(features[some])).float()
            one = F.cross_entropy(F.linear(states, *given), labels[some], reduction="sum")
            for place, gradient in enumerate(torch.autograd.grad(one, given)):
                sums[place] += gradient / len(rows)
            total = total + one.detach() / len(rows)
        torch.autograd.backward([total, *found], [torch.ones_like(total), *sums])
        return total.detach()

    optimizer = torch.optim.LBFGS(
        [point], max_iter=200, tolerance_grad=1e-5, history_size=20, line_search_fn="strong_wolfe"
    )
    optimizer.step(loss)
    weights, logits = model()
    return weights.detach().numpy(), logits.detach().numpy()
