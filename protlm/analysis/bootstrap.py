"""95 % intervals by the bootstrap: percentiles over units drawn with replacement.

A metric that chooses on the labels it is measured with is too high on average, and higher still in
resamples, which have rows twice: its interval is corrected (docs/decisions/0044-intervals.md).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat, starmap
from typing import Any

import numpy as np

RESAMPLES = 1000
# Whose results are compared: those of a model, and of its architecture with random weights.
MODEL, RANDOM = "model", "random_weights"


def draws(size: int, *, seed: int, number: int = RESAMPLES) -> Iterator[np.ndarray]:
    """Yields resamples: as many of the numbers 0 to `size` - 1, drawn with replacement, int64."""
    draw = partial(np.random.default_rng(seed).integers, size, size=size)
    return starmap(draw, repeat((), number))


def bounds(
    values: np.ndarray,
    of: float = 0.0,
    left_out: np.ndarray | None = None,
    *,
    is_share: bool = True,
) -> tuple[float, float]:
    """Returns the 2.5 % and 97.5 % quantiles of the defined values; NaN if none is defined.

    With the metric itself and its values with each block left out, the bounds are those of a metric
    that the resamples are biased for: a share of 0 to 1, or a difference of two.
    """
    defined = values[~np.isnan(values)]
    if not len(defined):
        return np.nan, np.nan
    low, high = np.quantile(defined, [0.025, 0.975])
    if left_out is not None:
        low, high = _corrected(of, defined.mean() - of, left_out, is_share=is_share)
    return float(low), float(high)


def _corrected(value: float, bias: float, left_out: np.ndarray, *, is_share: bool) -> np.ndarray:
    """Returns normal bounds around the value without its bias; those of shares in log odds.

    The error is that of the jackknife, and the bias counts as its own uncertainty.
    """
    from scipy.special import expit, logit

    center, error = value - bias, np.sqrt(np.nansum((left_out - value) ** 2))
    ends = np.array([-1.959964, 1.959964]) * np.hypot(error, bias)
    if is_share and 0 < center < 1:
        return expit(logit(center) + ends / (center * (1 - center)))
    return (center + ends).clip(0 if is_share else -1, 1)


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
        return bounds(self._column(name), self.values[name], self.left_out.get(name))

    def less(self, other: "Metrics", name: str) -> dict[str, float | None]:
        """Returns the difference of a metric from that of another, and its paired interval."""
        value, drawn = self.values[name] - other.values[name], self._column(name)
        left_out = self.left_out[name] - other.left_out[name] if name in self.left_out else None
        found = bounds(drawn - other._column(name), value, left_out, is_share=False)
        return plain_interval(value, *found)

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


def plain_interval(value: float, low: float, high: float) -> dict[str, float | None]:
    """Returns {"value", "low", "high"} for JSON."""
    named = {"value": value, "low": low, "high": high}
    return {name: finite_or_none(number) for name, number in named.items()}


def finite_or_none(value: float) -> float | None:
    """Returns the number, or None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
