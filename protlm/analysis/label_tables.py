"""Tables of labels, one row for each sequence or structure."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

from protlm.errors import InputDataError
from protlm.paths import existing_file


def read_labels(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields these columns of every row of a tab-separated table with a header, plain or gzip.

    Raises:
        InputDataError: the table is missing, damaged, or lacks a column.
    """
    try:
        content = existing_file(path, "a table of labels").read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        rows = csv.reader(
            io.StringIO(content.decode("utf-8")), delimiter="\t", quoting=csv.QUOTE_NONE
        )
        header = next(rows, [])
        if missing := [column for column in columns if column not in header]:
            raise InputDataError(
                f"{path} has the columns {', '.join(header)[:200]}, not {missing[0]}; name the "
                "columns in its first line, separated by tabs"
            )
        places = [header.index(column) for column in columns]
        for number, row in enumerate(rows, start=2):
            if len(row) != len(header):
                raise InputDataError(
                    f"{path}, line {number}: {len(row)} fields, not the {len(header)} of the header"
                )
            yield tuple(row[place] for place in places)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise InputDataError(f"{path} cannot be read as a table of labels: {error}") from error
