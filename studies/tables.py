"""Tables that studies read, and those of their results."""

from collections.abc import Sequence
from pathlib import Path

from protlm.data.tables import read_table
from protlm.system.paths import complete_file


def rows_of(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a table, plain or gzip, by the names of the columns."""
    columns, rows = read_table(path, "a table")
    return [dict(zip(columns, row, strict=True)) for _, row in rows]


def write_text(path: Path, text: str) -> None:
    """Writes a text in the place of an earlier one, complete or not at all."""
    with complete_file(path, overwrite=True) as temporary:
        temporary.write_text(text, encoding="utf-8")


def markdown(rows: Sequence[Sequence[object]]) -> str:
    """Formats rows, of which the first are headings, in Markdown; a bar in a cell becomes a slash.

    >>> print(markdown([("model", "P@L"), ("a", "3.1%")]))
    | model | P@L |
    | --- | --- |
    | a | 3.1% |
    """
    headings, *others = rows
    lines = [headings, ["---"] * len(headings), *others]
    cells = ([str(cell).replace("|", "/") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
