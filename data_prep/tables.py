"""Tab-separated tables, plain or gzip, read line by line, since they may exceed memory."""

from collections.abc import Iterator
from pathlib import Path

from protlm.data.records.source import TextSource
from protlm.system.errors import InputDataError
from protlm.system.paths import existing_file


def read_rows(path: Path, what: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the number, from 1, and the fields of each line that is not blank.

    Args:
        path: the table.
        what: description for messages, for instance "a split table".
    """
    is_empty = True
    # Tables are read more than once, so standard input is not allowed.
    with TextSource(existing_file(path, what), what) as source:
        for number, line in enumerate(source.text, start=1):
            fields = line.rstrip("\n").split("\t")
            if fields != [""]:
                is_empty = False
                yield number, fields
    if is_empty:
        raise InputDataError(f"{path}, line 1: the table is empty; give {what}")


def excerpt(fields: list[str]) -> str:
    """Formats a line for messages, with tabs and control characters escaped, and truncated.

    >>> print(excerpt(["P1", "train"]))
    'P1\\ttrain'
    """
    line = "\t".join(fields)
    return f"{line!r:.80}"
