"""Tables with a header, separated by commas, tabs or semicolons, plain or gzip; and their cells."""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from protlm.data.records.source import ByteSource
from protlm.system.errors import InputDataError
from protlm.system.paths import existing_file

# Tables of variants, which repeat a sequence of thousands of residues, compress by up to 130:1.
_MOST_BYTES, _BOMB_BYTES, _BOMB_RATIO = 1 << 31, 1 << 26, 200
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
# A cell is missing if it is one of these, as pandas or people write them; `none` may be a class.
MISSING = frozenset(
    ["", "#N/A", "#NA", "<NA>", "N/A", "n/a", "NA", "NULL", "null", "NaN", "nan", "NAN", "None"]
) | {"-", ".", "N.A.", "n.a.", "N.D.", "n.d."}
# What spreadsheets run as a formula: not numbers or ranges of them, or a single sign.
_FORMULA = re.compile(
    r"(?!.$)(?:[=@\t\r\n＝＠]|[+\-＋－](?!([0-9.,%eE+-]*|inf|infinity|nan)$))", re.IGNORECASE
)


def read_text(path: Path, what: str) -> str:
    """Returns the content of a UTF-8 file, plain or gzip, without a byte order mark."""
    content = bytearray()
    with ByteSource(existing_file(path, what), what) as source:
        for chunk in source.chunks():
            content += chunk
            if len(content) > min(_MOST_BYTES, max(_BOMB_BYTES, _BOMB_RATIO * source.num_bytes)):
                raise InputDataError(
                    f"{path} expands to over {len(content) >> 20:,} MiB, too much for {what}; "
                    "divide it, or give another file"
                )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputDataError(
            f"{path}, line {line}: it cannot be read as {what}, since byte {error.start + 1:,} is "
            f"not UTF-8; if it was saved as Latin-1, type: iconv -f CP1252 -t UTF-8 {path.name}"
        ) from None


def number_of(text: str) -> float | None:
    """Returns a finite number that is written with ASCII digits and a point; None of other text."""
    value = float(text) if _NUMBER.fullmatch(text) else math.inf
    return value if math.isfinite(value) else None


def write_rows(file: IO[str], delimiter: str, rows: Iterable[Sequence[str]]) -> None:
    """Writes rows of a table; a cell that spreadsheets would run as a formula begins with `'`."""
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    writer.writerows([f"'{one}" if _FORMULA.match(one) else one for one in row] for row in rows)


def read_table(
    path: Path, what: str, names: Sequence[str] = ()
) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Returns the header, and an iterator over the line numbers and cells of the rows.

    Blanks around the names of columns are removed, and rows without any text are left out.

    Args:
        path: the table.
        what: its description in messages.
        names: columns whose names are also found in other cases, and returned as they are here.
    """
    lines = _rows(path, read_text(path, what))
    columns = [name.strip() for name in next(lines, (0, []))[1]]
    wanted = {name.lower(): name for name in names if name not in columns}
    columns = [one if one in names else wanted.get(one.lower(), one) for one in columns]
    repeated = sorted(name for name, count in Counter(columns).items() if name and count > 1)
    if repeated:
        raise InputDataError(
            f"{path} has several columns of the name {', '.join(repeated)[:200]}; rename all but "
            "one of each"
        )
    return columns, _of_width(path, len(columns), lines)


def read_labels(path: Path, key: str, column: str) -> dict[str, str]:
    """Returns a column of a table of labels, by the names in the column `key`."""
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
        if (name := row[place].strip()) in found:
            raise InputDataError(
                f"{path}, line {line}: {name} is repeated; leave one row for each {key}"
            )
        found[name] = row[label].strip()
    return found


def _rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    header = text.lstrip("\r\n ").partition("\n")[0]
    delimiter = "\t" if "\t" in header else max(",;", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        for row in reader:
            if any(map(str.strip, row)):
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
