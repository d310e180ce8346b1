"""The table of residue ranges over which `protlm embed --include ranges` averages."""

from collections.abc import Sequence
from pathlib import Path

from protlm.data.tables import read_table
from protlm.system.errors import InputDataError
from protlm.system.terminal import printable

Ranges = tuple[tuple[int, int], ...]
_COLUMNS = ("accession", "first", "last")


def read_ranges(path: Path) -> dict[str, Ranges]:
    """Returns the ranges of each protein, in the order of a table; residues count from 1."""
    columns, rows = read_table(path, "a table of ranges")
    if missing := [name for name in _COLUMNS if name not in columns]:
        raise InputDataError(
            f"{path} has no column {missing[0]}; its first line has to name the columns "
            "accession, first and last, separated by tabs"
        )
    places = [columns.index(name) for name in _COLUMNS]
    found: dict[str, Ranges] = {}
    for line, row in rows:
        accession, *ends = (row[place] for place in places)
        first, last = (_number(end) for end in ends)
        if not 1 <= first <= last:
            raise InputDataError(
                f"{path}, line {line}: {' to '.join(ends)} is not a range; residues are counted "
                "from 1, and the last one is included"
            )
        found[accession] = (*found.get(accession, ()), (first, last))
    return found


def check_ranges(
    path: Path, ranges: dict[str, Ranges], names: Sequence[str], lengths: Sequence[int]
) -> None:
    """Refuses ranges outside of the proteins."""
    known = dict(zip(names, lengths, strict=True))
    for name, some in ranges.items():
        if name not in known:
            raise InputDataError(
                f"{path}: {printable(name)} is not among the embedded proteins; correct the "
                "accession or remove its rows"
            )
        last = max(end for _, end in some)
        if last > known[name]:
            raise InputDataError(
                f"{path}: a range of {printable(name)} ends at residue {last:,}, and it has "
                f"{known[name]:,}; correct the range"
            )


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0
