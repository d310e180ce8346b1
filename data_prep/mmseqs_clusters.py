"""Clusters of some thousands of sequences, found by MMseqs2."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from protlm.system.interruption import sigterm_as_interrupt
from protlm.system.paths import explain_os_error

from .mmseqs import find_mmseqs, run_mmseqs
from .tables import read_rows

MIN_IDENTITY = 0.3
# Of the shorter and of the longer sequence of a pair.
_COVERAGE = ("-c", "0.8", "--cov-mode", "0")


def cluster_sequences(sequences: Sequence[str], min_identity: float = MIN_IDENTITY) -> list[int]:
    """Returns the number of each sequence's cluster: the row of its representative.

    Args:
        sequences: residues in upper case.
        min_identity: between a member and its representative.
    """
    find_mmseqs()
    clusters = list(range(len(sequences)))
    with sigterm_as_interrupt(), TemporaryDirectory(prefix="protlm-clusters-") as scratch:
        folder = Path(scratch)
        fasta = folder / "sequences.fasta"
        try:
            fasta.write_text("".join(f">{n}\n{one}\n" for n, one in enumerate(sequences)))
        except OSError as error:
            raise explain_os_error(error, folder) from error
        identity = ("--min-seq-id", str(min_identity))
        command = ["easy-cluster", fasta, folder / "found", folder / "tmp"]
        run_mmseqs([*command, *identity, *_COVERAGE])
        for _, (representative, member) in read_rows(folder / "found_cluster.tsv", "clusters"):
            clusters[int(member)] = int(representative)
    return clusters
