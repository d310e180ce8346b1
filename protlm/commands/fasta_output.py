"""FASTA output of `data export` and `generate`: to standard output, a file or a gzip file."""

import gzip
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO

from protlm.system.errors import OutputError
from protlm.system.paths import complete_file
from protlm.system.terminal import printable

STANDARD_OUTPUT = Path("-")
_COLUMNS = 60


def fasta_text(header: str, residues: str) -> str:
    """Formats a record as FASTA, 60 residues per line; control characters are escaped.

    >>> fasta_text("P1", "MKT")
    '>P1\\nMKT\\n'
    """
    rows = [residues[start : start + _COLUMNS] for start in range(0, len(residues), _COLUMNS)]
    return "\n".join([f">{printable(header)}", *rows, ""])


@contextmanager
def fasta_file(output: Path) -> Iterator[TextIO]:
    """Opens a FASTA file for writing; it gets its final name only when it is complete.

    Args:
        output: the file, gzip if its name ends with .gz; `-` is standard output.
    """
    if output == STANDARD_OUTPUT:
        # A process can be started without standard output.
        if sys.stdout is None:
            raise OutputError("standard output is closed; give a file: -o NAME.fasta")
        yield sys.stdout
        return
    with (
        complete_file(output) as temporary,
        temporary.open("wb") as raw,
        io.TextIOWrapper(_compressed(raw, output), encoding="utf-8") as file,
    ):
        yield file


def _compressed(raw: IO[bytes], output: Path) -> IO[bytes] | gzip.GzipFile:
    """Returns a writer to `raw` that compresses if the name of the output ends with .gz."""
    if output.suffix.lower() != ".gz":
        return raw
    # Without a name and a time, so that the same sequences make the same bytes.
    return gzip.GzipFile("", "wb", fileobj=raw, mtime=0)
