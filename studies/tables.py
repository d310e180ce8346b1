"""Tables of results."""

from collections.abc import Sequence


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
