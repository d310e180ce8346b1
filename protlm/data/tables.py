"""Tables with a header, separated by commas, tabs or semicolons, plain or gzip; and their cells."""

import csv
import io
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO

from protlm.data.records.format_detection import NO_TABLE, foreign_format
from protlm.data.records.source import ByteSource, as_utf8, text_lines
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import complete_file
from protlm.system.terminal import printable

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
# Tables of variants, which repeat a sequence of thousands of residues, compress by up to 130:1.
_MOST_BYTES, _BOMB_BYTES, _BOMB_RATIO = 1 << 31, 1 << 26, 200
_START_BYTES = 1 << 16
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
# A number with commas, and perhaps an uncertainty and a unit.
_NOTATION = re.compile(
    r"([-+]?[0-9.,]{1,40}(?:[eE][-+]?[0-9]{1,9})?)(?:\s*(?:±|\+/-)[\s0-9.,]{1,40})?"
    r"(?:\s*[a-zµμ°Å%/][^\s\d]{0,9}|\s+[A-Z][^\s\d]{0,9})?"
)
# The names of splits, as people write them in small letters.
SPLITS = {
    **dict.fromkeys(["train", "training"], "train"),
    "test": "test",
    **dict.fromkeys(["valid", "validation", "val", "dev"], "valid"),
}
# A cell is missing if it is one of these, as pandas or people write them; `none` may be a class.
MISSING = frozenset(
    ["", "#N/A", "#NA", "<NA>", "N/A", "n/a", "NA", "NULL", "null", "NaN", "nan", "NAN", "None"]
) | {"-", ".", "N.A.", "n.a.", "N.D.", "n.d."}
# What spreadsheets run as a formula: not numbers or ranges of them, or a single sign.
_FORMULA = re.compile(
    r"(?!.$)(?:[=@\t\r\n＝＠]|[+\-＋－](?!([0-9.,%eE+-]*|inf|infinity|nan)$))", re.IGNORECASE
)


# The header of DeepFRI's annotations, below lists of all terms and names.
_ANNOTATIONS = re.compile(r"^### (?=PDB-chain\t)", re.MULTILINE)
# In the header of a domain of SCOPe: d1dlwa_ a.1.1.1 (A:) ...
_SCOPE = re.compile(r"^>(\S+)[ \t]+([a-z](?:\.\d+){3})(?=\s)", re.MULTILINE)
_LEVELS = ("class", "fold", "superfamily", "family")
# Lines that may precede the header, which may begin with # itself; spreadsheets quote comments.
_COMMENTS = re.compile(r'(?:"?#[^\n]*(?:\n|\Z)|[ \t\r]*\n)+')
_LMDB = b"\xde\xc0\xef\xbe"


def read_text(path: Path, what: str) -> str:
    """Returns the content of a UTF-8 file, plain or gzip, without a byte order mark."""
    _refuse_lmdb(path)
    content = bytearray()
    with ByteSource(path, what) as source:
        for block in source.blocks():
            content += block
            if len(content) > min(_MOST_BYTES, max(_BOMB_BYTES, _BOMB_RATIO * source.num_bytes)):
                raise InputDataError(
                    f"{path} expands to over {len(content) >> 20:,} MiB, too much for {what}; "
                    "divide it, or give another file"
                )
    if NO_TABLE.match(start := bytes(content[:_START_BYTES])):
        raise InputDataError(f"{path}: {foreign_format(start)}, not {what}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputDataError(
            f"{path}, line {line}: it cannot be read as {what}, since byte {error.start + 1:,} is "
            f"not UTF-8; if it was saved as Latin-1, type: {as_utf8(path, 'CP1252')}"
        ) from None


def _refuse_lmdb(path: Path) -> None:
    """Refuses the databases of TAPE and PEER: a pickle can run any program when it is read."""
    data = path / "data.mdb" if path.is_dir() else path
    with data.open("rb") if data.is_file() else io.BytesIO() as file:
        is_lmdb = file.read(20)[16:] == _LMDB
    if is_lmdb:
        raise InputDataError(
            f"{path} is LMDB, whose values are pickles in TAPE and PEER, which protlm does not "
            "read; if you trust the file, make a table of it, with lmdb and pandas:\n"
            "import lmdb, numpy, pandas, pickle\n"
            f"with lmdb.open({str(path)!r}, subdir={path.is_dir()}, readonly=True, lock=False)"
            ".begin() as t: pandas.DataFrame([{a: numpy.squeeze(b).tolist() for a, b in "
            'pickle.loads(v).items()} for k, v in t.cursor() if k != b"num_examples"])'
            '.to_csv("table.csv")'
        )


def number_of(text: str) -> float | None:
    """Returns a number in ASCII, to ±1e100, as squares of others overflow; None of other text."""
    value = float(text) if _NUMBER.fullmatch(text) else math.inf
    return value if abs(value) <= 1e100 else None


def number_meant(text: str) -> str:
    """Returns how to type what a text such as 1,234 or 5±1 nM may mean: 1234 or 1.234; or ""."""
    found = _NOTATION.fullmatch(re.sub("[\u2010-\u2015\u2212]", "-", text))
    number = found[1] if found else ""
    whole = re.sub(r"(?<!\b0),(?=[0-9]{3}(?![0-9]))", "", number)
    point = re.sub(r"\.(?=.*,)", "", number).replace(",", ".")
    return " or ".join(one for one in dict.fromkeys([whole, point]) if number_of(one) is not None)


def write_rows(file: IO[str], delimiter: str, rows: Iterable[Sequence[str]]) -> None:
    """Writes rows of a table; a cell that spreadsheets would run as a formula begins with `'`."""
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    writer.writerows([f"'{one}" if _FORMULA.match(one) else one for one in row] for row in rows)


def is_table(output: Path) -> bool:
    """Returns whether a name is that of a table."""
    return output.suffix.lower() in _SEPARATORS


def check_table_output(output: Path) -> None:
    """Refuses a name that is not that of a table."""
    if not is_table(output):
        raise UserError(
            f"{output}: the output is a table, .csv or .tsv", {"output": output.with_suffix(".csv")}
        )


def write_table(path: Path, header: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    """Writes a table, comma-separated or, if its name ends with .tsv, tab-separated."""
    with (
        complete_file(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        write_rows(file, _SEPARATORS[path.suffix.lower()], chain([[*header]], rows))


def read_table(
    path: Path, what: str, names: Sequence[str] = ()
) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Returns the header, and an iterator over the line numbers and cells of the rows.

    Blanks around the names of columns are removed, and rows without any text are left out. Columns
    of these names are also found in other cases, and returned as they are here.
    """
    lines = _rows(path, read_text(path, what), names)
    columns = [name.strip() for name in next(lines, (0, []))[1]]
    if not columns:
        raise InputDataError(f"{path}: the file is empty, or has comments alone; give {what}")
    wanted = {name.lower(): name for name in names if name not in columns}
    columns = [one if one in names else wanted.get(one.lower(), one) for one in columns]
    repeated = sorted(name for name, count in Counter(columns).items() if name and count > 1)
    if repeated:
        raise InputDataError(
            f"{path} has several columns of the name {', '.join(repeated)[:200]}; rename all but "
            "one of each"
        )
    return columns, lines


def places_of(path: Path, columns: Sequence[str], names: Sequence[str]) -> list[int]:
    """Returns the places of the columns that a table must have; accessions may be UniProt's."""
    if "accession" in names and "accession" not in columns and "Entry" in columns:
        print(printable(f"{path}: accessions from the column Entry"), file=sys.stderr)
        columns = ["accession" if one == "Entry" else one for one in columns]
    if missing := [name for name in names if name not in columns]:
        raise InputDataError(
            f"{path} has no column {missing[0]}, only {', '.join(columns)!r:.200}; name the "
            f"columns in its first line, separated by tabs: {', '.join(names)}"
        )
    return [columns.index(name) for name in names]


def read_columns(path: Path, what: str, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Returns the line number and the cells of these columns of each row of a table."""
    columns, rows = read_table(path, what, names)
    places = places_of(path, columns, names)
    return ((line, [row[place] for place in places]) for line, row in rows)


def read_rows(path: Path, what: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the number, from 1, and the fields of each line that is not blank.

    Fields are separated by tabs; lines are read one by one, since a table may exceed the memory.
    """
    is_empty = True
    for number, line in enumerate(text_lines(path, what), start=1):
        if line:
            is_empty = False
            yield number, line.split("\t")
    if is_empty:
        raise InputDataError(f"{path}, line 1: the table is empty; give {what}")


def read_clusters(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yields the line number, the representative and the member of each row of a cluster table.

    It is the `cluster.tsv` of MMseqs2, plain or gzip, without a header.
    """
    for number, fields in read_rows(path, "a cluster table"):
        if len(fields) != 2 or not all(fields):
            raise InputDataError(
                f"{path}, line {number}: {excerpt(fields)} is not a representative and a member, "
                "separated by a tab (the cluster.tsv of MMseqs2)"
            )
        yield number, fields[0], fields[1]


def excerpt(fields: list[str]) -> str:
    """Formats a line for messages, with tabs and control characters escaped, and truncated.

    >>> print(excerpt(["P1", "train"]))
    'P1\\ttrain'
    """
    return repr("\t".join(fields))[:80]


def read_labels(path: Path, key: str, column: str) -> dict[str, str]:
    """Returns a column of a table of labels, by the names in the column `key`.

    Of a FASTA file of SCOPe, the columns are class, fold, superfamily and family.
    """
    if domains := _SCOPE.findall(read_text(path, "a table of labels")):
        if column not in _LEVELS:
            raise InputDataError(f"{path}: {column} is not one of SCOPe's {', '.join(_LEVELS)}")
        level = 1 + _LEVELS.index(column)
        return {name: ".".join(family.split(".")[:level]) for name, family in domains}
    labels: dict[str, str] = {}
    for line, cells in read_columns(path, "a table of labels", (key, column)):
        name, label = map(str.strip, cells)
        if name in labels:
            raise InputDataError(
                f"{path}, line {line}: {name} is repeated; leave one row for each {key}"
            )
        labels[name] = label
    return labels


def _rows(path: Path, text: str, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    skipped = 0
    if text.startswith("###") and (start := _ANNOTATIONS.search(text)):
        skipped, text = text.count("\n", 0, start.start()), text[start.end() :]
    if comments := _COMMENTS.match(text):
        # The header is the first line without #, or else the last one before it that has a name.
        known = "|".join(map(re.escape, names)) or "(?!)"
        named = re.compile(rf'(?im)^(?:.*[,;\t])?["# ]*(?:{known})[" \r]*(?:[,;\t]|$)')
        found = named.finditer(text, 0, text.find("\n", begin := comments.end()))
        begin = max((one.start() for one in found), default=begin)
        skipped, text = skipped + text.count("\n", 0, begin), text[begin:].lstrip("# ")
    header = text.partition("\n")[0]
    delimiter = "\t" if "\t" in header else max(",;", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    width = 0
    try:
        for row in reader:
            if any(map(str.strip, row)):
                width, line = width or len(row), skipped + reader.line_num
                if len(row) != width:
                    raise InputDataError(
                        f"{path}, line {line}: {len(row)} fields, not the {width} of the header"
                    )
                yield line, row
    except csv.Error as error:
        limit = f"a cell has over {csv.field_size_limit():,} characters; close a quotation mark"
        what = limit if "limit" in str(error) else error
        raise InputDataError(f"{path}, line {skipped + reader.line_num}: {what}") from error
