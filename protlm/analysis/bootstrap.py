"""95 % intervals by the bootstrap: percentiles over units drawn with replacement.

A metric that chooses on the labels it is measured with is too high on average, and higher still in
resamples, which have rows twice: its interval is corrected (docs/decisions/0044-intervals.md).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protlm.analysis.intervals import plain_interval

RESAMPLES = 1000
# Whose results are compared: those of a model, and of its architecture with random weights.
MODEL, RANDOM = "model", "random_weights"


def draws(size: int, *, seed: int, number: int = RESAMPLES) -> Iterator[np.ndarray]:
    """Yields resamples: as many of the numbers 0 to `size` - 1, drawn with replacement, int64."""
    rng = np.random.default_rng(seed)
    return (rng.integers(size, size=size) for _ in range(number))


def percentiles(values: np.ndarray) -> tuple[float, float]:
    """Returns the 2.5 % and 97.5 % quantiles of the defined values; NaN if no value is defined."""
    defined = values[~np.isnan(values)]
    low, high = np.quantile(defined, [0.025, 0.975]) if len(defined) else (np.nan, np.nan)
    return float(low), float(high)


def corrected(
    value: float, resampled: np.ndarray, left_out: np.ndarray, *, is_difference: bool = False
) -> tuple[float, float]:
    """Returns normal bounds around a metric of 0 to 1, or a difference, without its bias.

    The bias is that of the resamples, and counts as its own uncertainty. The error is the root of
    the sum of squared changes of the metric with each block of units left out.
    """
    from scipy.special import expit, logit

    defined = resampled[~np.isnan(resampled)]
    bias = (defined.mean() if len(defined) else np.nan) - value
    # Around the value, so that a block without units, or without which nothing is defined, adds 0.
    center, error = value - bias, np.sqrt(np.nansum((left_out - value) ** 2))
    ends = np.array([-1.959964, 1.959964]) * np.hypot(error, bias)
    if 0 < center < 1 and not is_difference:
        low, high = expit(logit(center) + ends / (center * (1 - center)))
    else:
        low, high = (center + ends).clip(-1 if is_difference else 0, 1)
    return float(low), float(high)


def ratio_interval(
    totals: np.ndarray, counts: np.ndarray | None = None, *, seed: int = 0
) -> dict[str, Any]:
    """Returns Σ totals / Σ counts over proteins, with its interval over proteins.

    Counts are 1 by default, which makes the ratio a mean; `count` is the number of proteins. For a
    paired comparison of one denominator, the totals are differences of two totals.
    """
    counts = np.ones(len(totals)) if counts is None else counts
    found = ratio_of("mean", totals, counts, seed=seed)
    low, high = found.interval("mean")
    return {**found.values, "low": low, "high": high, "count": len(totals)}


@dataclass(frozen=True)
class Metrics:
    """Metrics by name, NaN where undefined, and those of each resample, [resamples, metrics].

    The resamples are the same for all that are compared. Metrics that choose on the labels also
    have the values with each block of units left out, [blocks].
    """

    values: Mapping[str, float]
    resampled: np.ndarray
    left_out: Mapping[str, np.ndarray] = field(default_factory=dict, kw_only=True)

    def interval(self, name: str) -> tuple[float, float]:
        """Returns the bounds of the interval of a metric; NaN if it is undefined."""
        if name in self.left_out:
            return corrected(self.values[name], self._column(name), self.left_out[name])
        return percentiles(self._column(name))

    def less(self, other: "Metrics", name: str) -> dict[str, float | None]:
        """Returns the difference of a metric from that of another, and its paired interval."""
        value = self.values[name] - other.values[name]
        resampled = self._column(name) - other._column(name)
        if name not in self.left_out:
            return plain_interval(value, *percentiles(resampled))
        left_out = self.left_out[name] - other.left_out[name]
        return plain_interval(value, *corrected(value, resampled, left_out, is_difference=True))

    def to_plain(self) -> dict[str, dict[str, float | None]]:
        """Returns the value and the bounds of each metric for JSON."""
        return {
            name: plain_interval(value, *self.interval(name)) for name, value in self.values.items()
        }

    def _column(self, name: str) -> np.ndarray:
        return self.resampled[:, list(self.values).index(name)]


def ratio_of(name: str, totals: np.ndarray, counts: np.ndarray, *, seed: int = 0) -> Metrics:
    """Returns Σ totals / Σ counts over proteins; all ratios have the same draws."""
    both = [np.asarray(x, dtype=np.float64) for x in (totals, counts)]
    drawn = np.stack([np.arange(len(totals)), *draws(len(totals), seed=seed)])
    sums, sizes = (x[drawn].sum(axis=1) for x in both)
    found = np.divide(sums, sizes, out=np.full(len(sums), np.nan), where=sizes > 0)
    return Metrics({name: float(found[0])}, found[1:, None])
