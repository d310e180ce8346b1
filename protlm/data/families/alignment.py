"""Rows of an alignment as relatives of one of them, the query."""

import re
from collections.abc import Iterator, Sequence
from os.path import commonprefix

import numpy as np

from protlm.data.families.family import Relative
from protlm.data.records import Record
from protlm.system.errors import InputDataError

# What marks a row as one of an alignment: a gap, or the lower case of an insertion.
_MARKS = re.compile("[-.~a-z]")
_GAPS = bytes.maketrans(b"~*", b"--")
# A row that HH-suite computes from the others.
CONSENSUS = re.compile(r"(?:\S*_)?consensus\b", re.IGNORECASE)


def is_aligned(records: Sequence[Record]) -> bool:
    """Returns whether records have gaps or insertions, which sequences do not have."""
    return any(_MARKS.search(record.row or "") for record in records)


def place_of_query(records: Sequence[Record], query: str | None, name: str, where: str) -> int:
    """Returns the row that is the query: the first, or one that has its residues."""
    # Rows that HH-suite computes are the last ones that it may be.
    order = sorted(range(len(records)), key=lambda n: bool(CONSENSUS.match(records[n].header)))
    equal = [n for n in order if records[n].sequence == query]
    if equal or query is None:
        return (equal or order)[0]
    found = records[order[0]]
    same = len(commonprefix([query, found.sequence]))  # noqa: RUF071
    first = query.find(found.sequence) + 1
    where_from = first or same + 1
    how = f"{'is a part of it,' if first else 'differs'} from residue {where_from:,} on"
    raise InputDataError(
        f"{where}: no row of the alignment is the query {name or '(without a name)'} of "
        f"{len(query):,} residues; its first row, {found.identifier} of {len(found.sequence):,}, "
        f"{how}. Residues and columns are numbered by the query: give the alignment of this "
        f"sequence, the residues of {found.identifier} in the alignment as the query, or the rows "
        "without gaps as FASTA (.fasta), which are unaligned relatives"
    )


def rows_of(records: Sequence[Record], where: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the letters and gaps of each row, uint8 in capitals, and which are columns, bool.

    Capitals and `-` are columns, lower case is an insertion and `.` pads others (A3M, A2M); without
    lower case, or if that makes unequal columns, all letters and gaps are columns.

    Args:
        records: those whose `row` has letters and gaps.
        where: the file, for messages.
    """
    texts = ["".join((one.row or one.sequence).split()).encode() for one in records]
    # A stop has a column, and no residue.
    texts = [text.translate(_GAPS) for text in texts]
    columns = _columns(records, [np.frombuffer(text, np.uint8) for text in texts], where)
    return [np.frombuffer(text.upper(), np.uint8) for text in texts], columns


def align(
    records: Sequence[Record], place: int, rows: list[np.ndarray], columns: list[np.ndarray]
) -> Iterator[Relative]:
    """Yields the rows of an alignment, as of `rows_of`, compared with that of the query."""
    own, is_own = columns[place], rows[place] >= ord("A")
    query = rows[place][is_own]
    # Of each column, the residue of the query in it or before it, and whether it is in it.
    position = np.cumsum(is_own, dtype=np.int32)[own] - 1
    is_there = is_own[own]
    for number, (record, row, is_column) in enumerate(zip(records, rows, columns, strict=True)):
        is_residue, letters = row >= ord("A"), np.zeros_like(query)
        # Before the first column it is -1, and then the first.
        column = np.maximum(np.cumsum(is_column) - 1, 0)
        places = np.maximum(position[column[is_residue]], 0)
        compared = is_residue[is_column] & is_there
        letters[position[compared]] = row[is_column][compared]
        if number == place:
            places, letters = np.arange(len(query), dtype=np.int32), query
        # A gap is never the letter of the query.
        identity = float((letters == query).mean())
        yield Relative(record.identifier, record.sequence, identity, places, letters)


def _columns(records: Sequence[Record], rows: Sequence[np.ndarray], where: str) -> list[np.ndarray]:
    """Returns which letters and gaps of each row are columns, bool."""
    wrong: list[str] = []
    has_insertions = any((row >= ord("a")).any() for row in rows)
    for marks in (True, False) if has_insertions else (False,):
        columns = [(row != ord(".")) & (row < ord("a")) | (not marks) for row in rows]
        widths = [int(one.sum()) for one in columns]
        if len({*widths}) == 1 and widths[0]:
            return columns
        other = next((n for n, width in enumerate(widths) if width != widths[0]), 0)
        wrong.append(
            f"{records[0].identifier} has {widths[0]:,} columns, and {records[other].identifier}, "
            f"line {records[other].line}, has {widths[other]:,}"
        )
    raise InputDataError(
        f"{where}: rows of an alignment have equal numbers of columns (capitals and gaps; lower "
        f"case is an insertion), but {wrong[0]}; give sequences that are not aligned as FASTA "
        "(.fasta), in capitals and without gaps"
    )
