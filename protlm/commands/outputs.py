"""Outputs of commands: what their names promise, and FASTA to standard output or a file."""

import gzip
import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from protlm.system.errors import OutputError, UserError
from protlm.system.paths import complete_file
from protlm.system.terminal import printable

STANDARD_OUTPUT = Path("-")
_COLUMNS = 60
# The suffixes, the usual one first, and what the output is.
HDF5 = (".h5", ".hdf5"), "an HDF5 file"
_OTHER_FORMATS = re.compile(
    r"\.(csv|gif|h5ad|jpe?g|json|npy|npz|parquet|pdf|pkl|png|pt|pth|svg|tsv|txt)"
)


def check_suffix(
    path: Path, suffixes: tuple[str, ...], what: str, *, otherwise: str | None = None
) -> None:
    """Refuses an output whose name promises another format than `what`.

    The usual suffix is first; `otherwise` is the option with which the name fits.
    """
    suffix = path.suffix.lower()
    is_known = suffix in HDF5[0] or _OTHER_FORMATS.fullmatch(suffix)
    if is_known and suffix not in suffixes:
        advice = f"; type: -o {path.with_suffix(suffixes[0])}"
        if otherwise is not None:
            advice += f", or: {otherwise}"
        raise UserError(f"{path}: the output is {what}, not {path.suffix}{advice}")


def fasta_text(header: str, residues: str) -> str:
    """Formats a record as FASTA, 60 residues per line; control characters are escaped.

    >>> fasta_text("P1", "MKT")
    '>P1\\nMKT\\n'
    """
    rows = [residues[start : start + _COLUMNS] for start in range(0, len(residues), _COLUMNS)]
    return "\n".join([f">{printable(header)}", *rows, ""])


@contextmanager
def fasta_file(output: Path) -> Iterator[TextIO]:
    """Opens a FASTA file, gzip if its name ends with .gz; `-` is standard output."""
    if output == STANDARD_OUTPUT:
        # A process can be started without standard output.
        if sys.stdout is None:
            raise OutputError("standard output is closed; give a file: -o NAME.fasta")
        yield sys.stdout
        return
    is_gzip = output.suffix.lower() == ".gz"
    with complete_file(output) as temporary, temporary.open("wb") as raw:
        # Without a name and a time, so that the same sequences make the same bytes.
        packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if is_gzip else raw
        with io.TextIOWrapper(packed, encoding="utf-8") as file:
            yield file
