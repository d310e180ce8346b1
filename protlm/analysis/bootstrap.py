"""Bootstrap intervals."""

from typing import Any

import numpy as np

_RESAMPLES = 1000


def ratio_interval(
    totals: np.ndarray, counts: np.ndarray | None = None, *, seed: int = 0
) -> dict[str, Any]:
    """Returns Σ totals / Σ counts over proteins, with a 95 % percentile interval over proteins.

    Args:
        totals: the total of each protein, for instance the correct predictions. For a paired
            comparison, the difference of two totals.
        counts: the count of each protein; by default 1, which makes the ratio a mean.
        seed: seed of the resampling, 1,000 times.

    Returns:
        {"mean", "low", "high", "count"}, where `count` is the number of proteins.
    """
    totals = np.asarray(totals, dtype=np.float64)
    counts = np.ones(len(totals)) if counts is None else np.asarray(counts, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(totals), size=(_RESAMPLES, len(totals)))
    sums, sizes = totals[drawn].sum(axis=1), counts[drawn].sum(axis=1)
    low, high = bounds(sums[sizes > 0] / sizes[sizes > 0])
    mean = float(totals.sum() / counts.sum())
    return {"mean": mean, "low": low, "high": high, "count": len(totals)}


def bounds(values: np.ndarray) -> tuple[float, float]:
    """Returns the 2.5 % and 97.5 % quantiles of the defined values; NaN if none is defined."""
    defined = values[~np.isnan(values)]
    if not len(defined):
        return np.nan, np.nan
    low, high = np.quantile(defined, [0.025, 0.975])
    return float(low), float(high)
