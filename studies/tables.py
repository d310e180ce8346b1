"""Tables that studies read, and those of their results."""

from collections.abc import Sequence
from pathlib import Path

from protlm.data.tables import read_table


def rows_of(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a table, plain or gzip, by the names of the columns."""
    columns, rows = read_table(path, "a table")
    return [dict(zip(columns, row, strict=True)) for _, row in rows]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows, of which the first are headings, in Markdown.

    >>> print(markdown([("model", "P@L"), ("a", "3.1%")]))
    | model | P@L |
    | --- | --- |
    | a | 3.1% |
    """
    headings, *others = rows
    lines = [headings, ["---"] * len(headings), *others]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
