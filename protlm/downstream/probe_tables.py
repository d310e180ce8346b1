"""The scores of the predictors of a probe, for JSON and for tables."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from protlm.downstream.probing import Predictor, over_best_baseline
from protlm.downstream.tasks import Task


def scores_of(predictors: Mapping[str, Predictor], task: Task) -> dict[str, Any]:
    """Returns all metrics, choices and intervals, and the comparison with the best baseline.

    Undefined values are None, because JSON has no NaN.
    """
    compared = asdict(over_best_baseline(predictors, task))
    return {
        "over_best_baseline": {
            name: finite_or_none(value) if isinstance(value, float) else value
            for name, value in compared.items()
        },
        "predictors": {name: _one(found) for name, found in predictors.items()},
    }


def _one(found: Predictor) -> dict[str, Any]:
    metrics = {}
    for name, value in found.scores.values.items():
        numbers = zip(("value", "low", "high"), (value, *found.scores.interval(name)), strict=True)
        metrics[name] = {key: finite_or_none(number) for key, number in numbers}
    by_layer = {str(layer): finite_or_none(value) for layer, value in found.by_layer.items()}
    return {
        "metrics": metrics,
        "layer": found.layer,
        "penalty": found.penalty,
        "by_layer": by_layer,
    }


def finite_or_none(value: float) -> float | None:
    """Returns the number, or None for NaN and infinity."""
    return value if math.isfinite(value) else None


def metric_rows(scores: Mapping[str, Any], heading: str = "labels by") -> list[list[str]]:
    """Returns headings and a row for each predictor: metrics, the interval of the first, layer.

    Args:
        scores: the value of `scores_of`.
        heading: that of the column of predictors.
    """
    predictors = scores["predictors"]
    first, *others = next(iter(predictors.values()))["metrics"]
    rows = [[heading, first, "95 %", *others, "layer"]]
    for name, found in predictors.items():
        metrics = found["metrics"]
        value, low, high = (_digits(metrics[first][key]) for key in ("value", "low", "high"))
        cells = (_digits(metrics[other]["value"]) for other in others)
        layer = "" if found["layer"] is None else str(found["layer"])
        rows.append([name, value, f"{low} to {high}", *cells, layer])
    return rows


def comparison(scores: Mapping[str, Any]) -> str:
    """Returns a sentence on the model and the best baseline.

    Args:
        scores: the value of `scores_of`.
    """
    over = scores["over_best_baseline"]
    value, low, high = (_digits(over[key], "+") for key in ("value", "low", "high"))
    return (
        f"{over['metric']} of the model less that of {over['baseline']}: {value} ({low} to {high})"
    )


def _digits(value: float | None, sign: str = "") -> str:
    return "undefined" if value is None else f"{value:{sign}.3f}"
