"""Tables with a header, comma- or tab-separated, plain or gzip."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

from protlm.errors import InputDataError
from protlm.paths import existing_file


def read_text(path: Path, what: str) -> str:
    """Returns the content of a UTF-8 file, plain or gzip, without a byte order mark.

    Raises:
        InputDataError: the file is missing or damaged; `what` describes the expected one.
    """
    try:
        content = existing_file(path, what).read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputDataError(f"{path} cannot be read as {what}: {error}") from error


def read_table(path: Path, what: str) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Returns the header, and an iterator over the line numbers and cells of the rows.

    Args:
        path: the table.
        what: its description in messages.

    Raises:
        InputDataError: the table is missing or damaged, or a column is repeated; while iterating, a
            row does not have the width of the header.
    """
    lines = _rows(path, read_text(path, what))
    _, columns = next(lines, (0, []))
    repeated = sorted({name for name in columns if name and columns.count(name) > 1})
    if repeated:
        raise InputDataError(
            f"{path} has several columns of the name {', '.join(repeated)[:200]}; rename all but "
            "one of each"
        )
    return columns, _of_width(path, len(columns), lines)


def read_labels(path: Path, key: str, column: str) -> dict[str, str]:
    """Returns a column of a table of labels, by the names in the column `key`.

    Raises:
        InputDataError: the table is missing or damaged, lacks a column, or repeats a name.
    """
    columns, rows = read_table(path, "a table of labels")
    for name in (key, column):
        if name not in columns:
            raise InputDataError(
                f"{path} has the columns {', '.join(columns)[:200]}, not {name}; name the columns "
                "in its first line, separated by tabs or commas"
            )
    place, label = columns.index(key), columns.index(column)
    found: dict[str, str] = {}
    for line, row in rows:
        if row[place] in found:
            raise InputDataError(
                f"{path}, line {line}: {row[place]} is repeated; leave one row for each {key}"
            )
        found[row[place]] = row[label]
    return found


def _rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    delimiter = "\t" if "\t" in text.lstrip("\r\n").partition("\n")[0] else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise InputDataError(f"{path}, line {reader.line_num}: {error}") from error


def _of_width(
    path: Path, width: int, lines: Iterator[tuple[int, list[str]]]
) -> Iterator[tuple[int, list[str]]]:
    for line, row in lines:
        if len(row) != width:
            raise InputDataError(
                f"{path}, line {line}: {len(row)} fields, not the {width} of the header"
            )
        yield line, row
