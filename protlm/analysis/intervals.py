"""Values with 95 % intervals: as two cells of a table, in a sentence, and as JSON.

`analysis.bootstrap` computes them. In JSON, a score is {"value", "low", "high"}, or has a mean in
place of the value; what is undefined is None.
"""

import math
from collections.abc import Mapping
from typing import Any

# The heading of the column of intervals.
HEADING = "95 %"
SCORE: tuple[str, ...] = ("value", "low", "high")
_UNDEFINED = "undefined"


def plain_interval(value: float, low: float, high: float) -> dict[str, float | None]:
    """Returns a score by the names in `SCORE`."""
    return {name: finite_or_none(x) for name, x in zip(SCORE, (value, low, high), strict=True)}


def finite_or_none(value: float) -> float | None:
    """Returns the number, or None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def shown(value: float | None, style: str = ".3f") -> str:
    """Formats a number, which may be undefined.

    >>> shown(0.5), shown(0.25, "+.1%"), shown(None)
    ('0.500', '+25.0%', 'undefined')
    """
    return _UNDEFINED if value is None or math.isnan(value) else f"{value:{style}}"


def score_cells(score: Mapping[str, Any], style: str = ".3f") -> tuple[str, str]:
    """Returns the cells of a value and of its interval.

    >>> score_cells({"value": 0.5, "low": 0.25, "high": 0.75})
    ('0.500', '0.250 to 0.750')
    >>> score_cells({"mean": 0.5, "low": None, "high": None})
    ('0.500', 'undefined')
    """
    value = score["value"] if "value" in score else score["mean"]
    return shown(value, style), bounds(score["low"], score["high"], style)


def bounds(low: float | None, high: float | None, style: str = ".3f") -> str:
    """Formats an interval, which may be undefined."""
    ends = shown(low, style), shown(high, style)
    return _UNDEFINED if _UNDEFINED in ends else " to ".join(ends)


def in_words(score: Mapping[str, Any], style: str = ".3f") -> str:
    """Returns a value with its interval.

    >>> in_words({"value": 0.5, "low": 0.25, "high": 0.75}, ".0%")
    '50% (25% to 75%)'
    >>> in_words({"value": None, "low": None, "high": None})
    'undefined'
    """
    value, interval = score_cells(score, style)
    return value if value == _UNDEFINED else f"{value} ({interval})"
