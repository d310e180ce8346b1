"""Wording of settings and differences in messages."""

import shlex
from typing import Any


def as_typed(flag: str, value: Any) -> str:
    """Returns a setting as it is typed on the command line.

    >>> as_typed("--deduplicate", True), as_typed("--min-length", None)
    ('with --deduplicate', 'without --min-length')
    >>> as_typed("--organism", ["9606", "Escherichia coli"])
    "with --organism 9606 --organism 'Escherichia coli'"
    """
    if value is None or value is False or value == []:
        return f"without {flag}"
    if value is True:
        return f"with {flag}"
    values = value if isinstance(value, list) else [value]
    return f"with {' '.join(f'{flag} {shlex.quote(str(one))}' for one in values)}"


def difference(before: Any, now: Any) -> str:
    """Describes the first difference of two JSON values that are not equal.

    >>> difference({"by": "hash", "otherwise": {"x": 0.1}}, {"by": "hash", "otherwise": {"x": 0}})
    'otherwise: x: 0.1, not 0'
    >>> difference(["a.fasta", "b.fasta"], ["b.fasta"])
    'a.fasta, not nothing'
    """
    if isinstance(before, dict) and isinstance(now, dict):
        # The kind of a rule is more informative than its numbers.
        names = sorted({**before, **now}, key=lambda name: name != "by")
        name = next(name for name in names if before.get(name) != now.get(name))
        return f"{name}: {difference(before.get(name), now.get(name))}"
    if isinstance(before, list) and isinstance(now, list):
        if sorted(before) == sorted(now):
            return "their order"
        gone, new = set(before) - set(now), set(now) - set(before)
        return f"{_some(sorted(gone))}, not {_some(sorted(new))}"
    return f"{_some([before])}, not {_some([now])}"


def _some(values: list[Any]) -> str:
    """Lists the values, truncated to the length of a message."""
    text = ", ".join(str(value) for value in values if value is not None)
    return f"{text:.200}" or "nothing"
