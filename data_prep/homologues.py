"""Homologues in `train` of held-out sequences, as MMseqs2 finds them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from data_prep.interruption import sigterm_as_interrupt
from data_prep.mmseqs import run_mmseqs
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import InputDataError
from protlm.paths import explain_os_error

MAX_E_VALUE = 1e-3


def highest_identities(queries: Sequence[np.ndarray], train: Iterable[np.ndarray]) -> np.ndarray:
    """For each query the highest identity of a hit with E < 1e-3, float64; NaN without a hit.

    Both sets are written as FASTA into a folder for temporary files (`TMPDIR`).

    Args:
        queries: tokens of the held-out sequences.
        train: tokens of the sequences they are searched in.

    Raises:
        UserError: MMseqs2 is not installed.
        InputDataError: it fails.
        OutputError: there is no space for the temporary files.
    """
    identities = np.full(len(queries), np.nan)
    # As large as the data set: nothing of it may stay when a cluster ends the job.
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
    """Writes sequences under their numbers."""
    with path.open("x", encoding="ascii") as file:
        for number, tokens in enumerate(sequences):
            file.write(f">{number}\n{VOCABULARY.decode(tokens)}\n")
