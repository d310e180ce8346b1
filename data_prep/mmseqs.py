"""MMseqs2, run as an external program: clusters of sequences, and a search for homologs."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from protlm.data.tables import read_clusters
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.interruption import sigterm_as_interrupt
from protlm.system.paths import explain_os_error

MIN_IDENTITY, MAX_E_VALUE = 0.3, 1e-3
# Of the shorter and of the longer sequence of a pair.
_COVERAGE = ("-c", "0.8", "--cov-mode", "0")
_LAST_LINES = 3
# Becomes a program, beside a process that kills their group when standard input closes: when the
# process that started it ends, even by SIGKILL.
_LEASH = """exec 3<&0; (read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 &
exec "$@" </dev/null 3<&-"""


def find_mmseqs() -> str:
    """Returns the path of the executable."""
    executable = shutil.which("mmseqs")
    if executable is None:
        raise UserError(
            "MMseqs2 is not installed (no mmseqs on the PATH); type: conda install -c "
            "conda-forge -c bioconda mmseqs2, or: apt install mmseqs2, or unpack a release of "
            "github.com/soedinglab/MMseqs2"
        )
    return executable


def run_mmseqs(arguments: Sequence[str | Path]) -> None:
    """Runs MMseqs2 quietly; it ends with this process, and so do the processes that it starts."""
    command = [find_mmseqs(), *map(str, arguments), "-v", "1"]
    watched, held = os.pipe()
    try:
        with subprocess.Popen(
            ["/bin/sh", "-c", _LEASH, "sh", *command],
            stdin=watched,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                printed = process.communicate()
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    finally:
        os.close(watched)
        os.close(held)
    if process.returncode == 0:
        return
    lines = [
        line.strip()
        for line in b"".join(printed).decode(errors="backslashreplace").splitlines()
        if line.strip()
    ]
    reason = "; ".join(lines[-_LAST_LINES:]) or "it printed nothing"
    kind = OutputError if "no space" in reason.lower() else InputDataError
    raise kind(f"mmseqs {arguments[0]} ended with {process.returncode}: {reason}")


def cluster_sequences(sequences: Sequence[str], min_identity: float = MIN_IDENTITY) -> list[int]:
    """Returns the number of each sequence's cluster: the row of its representative."""
    find_mmseqs()
    clusters = list(range(len(sequences)))
    with _scratch("protlm-clusters-") as folder:
        fasta = _write_fasta(sequences, folder / "sequences.fasta")
        identity = ("--min-seq-id", str(min_identity))
        command = ["easy-cluster", fasta, folder / "found", folder / "tmp"]
        run_mmseqs([*command, *identity, *_COVERAGE])
        for _, representative, member in read_clusters(folder / "found_cluster.tsv"):
            clusters[int(member)] = int(representative)
    return clusters


def highest_identities(queries: Sequence[np.ndarray], others: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the highest identity of each query's hits with E < 1e-3, float64; NaN without one."""
    identities = np.full(len(queries), np.nan)
    with _scratch("protlm-leakage-") as folder:
        hits = folder / "hits.tsv"
        files = [
            _write_fasta(map(VOCABULARY.decode, tokens), folder / name)
            for tokens, name in ((queries, "queries.fasta"), (others, "others.fasta"))
        ]
        options = ["-e", str(MAX_E_VALUE), "--format-output", "query,fident"]
        run_mmseqs(["easy-search", *files, hits, folder / "tmp", *options])
        with hits.open(encoding="utf-8") as file:
            for line in file:
                try:
                    query, identity = line.split("\t")
                    identities[int(query)] = np.fmax(identities[int(query)], float(identity))
                except (ValueError, IndexError):
                    raise InputDataError(f"mmseqs wrote a hit as {line!r:.80}") from None
    return identities


@contextmanager
def _scratch(prefix: str) -> Iterator[Path]:
    """Yields a temporary folder (`TMPDIR`), which is removed when a cluster ends the job, too.

    Its files may be as large as a data set.
    """
    with sigterm_as_interrupt(), TemporaryDirectory(prefix=prefix) as name:
        yield Path(name)


def _write_fasta(sequences: Iterable[str], path: Path) -> Path:
    try:
        with path.open("x", encoding="ascii") as file:
            for number, sequence in enumerate(sequences):
                file.write(f">{number}\n{sequence}\n")
    except OSError as error:
        raise explain_os_error(error, path.parent) from error
    return path
