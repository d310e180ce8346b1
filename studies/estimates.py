"""Measures the error of FAVOR+ as an estimate of softmax attention on random inputs.

Queries and keys have independent entries N(0, σ²), and values N(0, 1). The estimate of one weight
exp(q̂·k̂), q̂ = q / K^(1/4), has the relative standard deviation √((exp(|q̂ + k̂|²) - 1) / R) with R
positive features of independent rows (arXiv 2009.14794, Lemma 2), and |q̂ + k̂|² is 2σ²√K on
average, so σ decides how many features an estimate needs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from protlm.attention import Attention, create
from protlm.attention.base import Context

UNIFORM = "uniform"
ORTHOGONAL, IID = "orthogonal", "iid"


@final
class UniformAttention(Attention):
    """Mean pooling as an attention mechanism: every key has the same weight for every query."""

    supports_bidirectional = True
    supports_causal = False

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        """Returns the mean of the values at the true positions, at each of them."""
        assert not context.causal
        mask_B1L1 = context.mask_BL[:, None, :, None]
        sum_BH1C = v_BHLC.masked_fill(~mask_B1L1, 0).sum(dim=2, keepdim=True)
        return sum_BH1C / mask_B1L1.sum(dim=2, keepdim=True) * mask_B1L1


@dataclass(frozen=True)
class Setting:
    """The inputs of one panel: length, width of a head, deviation of entries."""

    length: int
    head_dim: int
    deviation: float

    @property
    def mean_square_sum(self) -> float:
        """E|q̂ + k̂|² is 2σ²√K."""
        return 2 * self.deviation**2 * math.sqrt(self.head_dim)

    @property
    def features_for_deviation_1(self) -> float:
        """This R gives a weight of average |q̂ + k̂|² a relative deviation of 1."""
        return math.expm1(self.mean_square_sum)


@dataclass(frozen=True)
class Row:
    """The error of one estimate of one sample's output."""

    setting: Setting
    estimator: str
    projection: str
    num_features: int
    sample: int
    relative_error: float
    mean_square_error: float


class Inputs(NamedTuple):
    """The queries, keys and values of one head."""

    q_BHLK: Tensor
    k_BHLK: Tensor
    v_BHLC: Tensor


class Curve(NamedTuple):
    """Quartiles over the samples, by the number of features."""

    features: np.ndarray
    low: np.ndarray
    median: np.ndarray
    high: np.ndarray


def estimators(setting: Setting) -> dict[str, dict[str, Any]]:
    """Returns the options of every estimator except its projection and its number of features."""
    optimal = {"estimator": "positive", "optimal_for": setting.mean_square_sum}
    return {
        # Its denominators may be negative; a floor far below any true one shows the effect.
        "trigonometric": {"estimator": "trigonometric", "denominator_floor": 1e-6},
        "positive": {"estimator": "positive"},
        "hyperbolic": {"estimator": "hyperbolic"},
        "OPRF": optimal,
        "antithetic OPRF": {**optimal, "antithetic": True},
        "regularized": {"estimator": "regularized"},
    }


def draw(setting: Setting, sample: int) -> Inputs:
    """Returns the inputs of a sample, a pure function of its number."""
    generator = torch.Generator().manual_seed(sample)
    shape = (1, 1, setting.length, setting.head_dim)
    q_BHLK, k_BHLK, v_BHLC = (torch.randn(shape, generator=generator) for _ in range(3))
    return Inputs(q_BHLK * setting.deviation, k_BHLK * setting.deviation, v_BHLC)


def mechanism(name: str, options: dict[str, Any], setting: Setting, seed: int) -> Attention:
    """Builds a mechanism for one head, as the models do."""
    return create(
        name,
        options,
        num_heads=1,
        head_dim=setting.head_dim,
        model_dim=setting.head_dim,
        max_length=setting.length,
        seed=seed,
    )


@torch.inference_mode()
def attend(attention: Attention, inputs: Inputs) -> Tensor:
    """Returns the output of a mechanism, bidirectional and without padding, BHLC."""
    hidden_BLD = inputs.v_BHLC[:, 0]
    mask_BL = torch.ones(hidden_BLD.shape[:2], dtype=torch.bool)
    return attention(*inputs, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=False)


def errors(estimate_BHLC: Tensor, exact_BHLC: Tensor) -> tuple[float, float]:
    """Returns the relative error in the Frobenius norm, and the mean square error."""
    # A denominator at its floor makes outputs whose squares float32 cannot hold.
    difference_BHLC = estimate_BHLC.double() - exact_BHLC
    relative = difference_BHLC.norm() / exact_BHLC.double().norm()
    return relative.item(), difference_BHLC.square().mean().item()


def measure(setting: Setting, features: Sequence[int], samples: int) -> Iterator[Row]:
    """Yields the errors of uniform attention and of every estimator, sample after sample."""
    for sample in range(samples):
        inputs = draw(setting, sample)
        exact_BHLC = attend(mechanism("softmax", {}, setting, seed=sample), inputs)
        pooled_BHLC = attend(UniformAttention(), inputs)
        yield Row(setting, UNIFORM, "", 0, sample, *errors(pooled_BHLC, exact_BHLC))
        for (name, options), projection, num_features in product(
            estimators(setting).items(), (ORTHOGONAL, IID), features
        ):
            chosen = {**options, "projection": projection, "num_features": num_features}
            attention = mechanism("performer_softmax", chosen, setting, seed=sample)
            error = errors(attend(attention, inputs), exact_BHLC)
            yield Row(setting, name, projection, num_features, sample, *error)


def curve(
    rows: Sequence[Row], estimator: str, projection: str = "", *, of: str = "relative_error"
) -> Curve:
    """Returns the quartiles of one estimator's errors, of rows that share a setting."""
    values: dict[int, list[float]] = {}
    for row in rows:
        if (row.estimator, row.projection) == (estimator, projection):
            values.setdefault(row.num_features, []).append(getattr(row, of))
    features = sorted(values)
    quartiles = np.array([np.quantile(values[m], (0.25, 0.5, 0.75)) for m in features])
    return Curve(np.array(features), *quartiles.T)


def features_to_beat_uniform(rows: Sequence[Row], estimator: str) -> int | None:
    """Returns the smallest R from which orthogonal rows do better than uniform attention."""
    bar = curve(rows, UNIFORM).median[0]
    found = curve(rows, estimator, ORTHOGONAL)
    worse = np.flatnonzero(~(found.median < bar))
    first = worse[-1] + 1 if len(worse) else 0
    return int(found.features[first]) if first < len(found.features) else None
