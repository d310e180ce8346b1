"""Marks for some of the values that a test is repeated with."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Returns the values; those that are not among `fast` are marked slow.

    A tuple is the values of several arguments.

    Raises:
        AssertionError: one of `fast` is not a value.
    """
    values = list(values)
    assert set(fast) <= set(values), f"{set(fast) - set(values)} are not among the values"
    rows = {value: value if isinstance(value, tuple) else (value,) for value in values}
    return [
        value if value in fast else pytest.param(*row, marks=pytest.mark.slow)
        for value, row in rows.items()
    ]
