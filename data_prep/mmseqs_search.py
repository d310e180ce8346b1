"""Search for homologs of held-out sequences in `train` with MMseqs2."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import InputDataError
from protlm.system.interruption import sigterm_as_interrupt
from protlm.system.paths import explain_os_error

from .mmseqs import run_mmseqs

MAX_E_VALUE = 1e-3


def highest_identities(queries: Sequence[np.ndarray], train: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the highest identity of each query's hits with E < 1e-3, float64; NaN without one.

    Both sets are written as FASTA to a temporary folder (`TMPDIR`).

    Args:
        queries: tokens of the held-out sequences.
        train: tokens of the sequences to search.
    """
    identities = np.full(len(queries), np.nan)
    # The files are as large as the data set and must be removed when a cluster ends the job.
    with sigterm_as_interrupt(), TemporaryDirectory(prefix="protlm-leakage-") as scratch:
        folder = Path(scratch)
        hits = folder / "hits.tsv"
        try:
            _write_fasta(queries, folder / "held_out.fasta")
            _write_fasta(train, folder / "train.fasta")
        except OSError as error:
            raise explain_os_error(error, folder) from error
        run_mmseqs(
            [
                *("easy-search", folder / "held_out.fasta", folder / "train.fasta", hits),
                *(folder / "tmp", "-e", str(MAX_E_VALUE), "--format-output", "query,fident"),
            ]
        )
        with hits.open(encoding="utf-8") as file:
            for line in file:
                try:
                    query, identity = line.split("\t")
                    identities[int(query)] = np.fmax(identities[int(query)], float(identity))
                except (ValueError, IndexError):
                    raise InputDataError(f"mmseqs wrote a hit as {line!r:.80}") from None
    return identities


def _write_fasta(sequences: Iterable[np.ndarray], path: Path) -> None:
    """Writes sequences named by their numbers."""
    with path.open("x", encoding="ascii") as file:
        for number, tokens in enumerate(sequences):
            file.write(f">{number}\n{VOCABULARY.decode(tokens)}\n")
