"""FASTA as `data export` and `generate` write it: printed, into a file, or into a gzip file."""

import gzip
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO

from protlm.errors import OutputError
from protlm.paths import complete_file

STANDARD_OUTPUT = Path("-")
_COLUMNS = 60


def fasta_text(header: str, residues: str) -> str:
    """A record as FASTA, 60 residues to a line.

    >>> fasta_text("P1", "MKT")
    '>P1\\nMKT\\n'
    """
    rows = [residues[start : start + _COLUMNS] for start in range(0, len(residues), _COLUMNS)]
    return "\n".join([f">{header}", *rows, ""])


@contextmanager
def fasta_file(output: Path) -> Iterator[TextIO]:
    """Opens a FASTA file to be written; it gets its name only when it is complete.

    Args:
        output: the file; a name that ends with .gz makes it gzip, and `-` is standard output.

    Raises:
        OutputError: the file exists already, or there is no space or permission; or standard
            output is closed.
    """
    if output == STANDARD_OUTPUT:
        # A process may be started without one.
        if sys.stdout is None:
            raise OutputError("standard output is closed; give a file: -o NAME.fasta")
        yield sys.stdout
        return
    with (
        complete_file(output) as temporary,
        temporary.open("wb") as raw,
        io.TextIOWrapper(_packed(raw, output), encoding="utf-8") as file,
    ):
        yield file


def _packed(raw: IO[bytes], output: Path) -> IO[bytes] | gzip.GzipFile:
    """What writes into `raw`, packed where the name of the output asks for it."""
    if output.suffix.lower() != ".gz":
        return raw
    # Without a name and a time inside: the same sequences make the same bytes.
    return gzip.GzipFile("", "wb", fileobj=raw, mtime=0)
