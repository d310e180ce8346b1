"""The sources clustered by MMseqs2's linclust, in time linear in their size."""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

from data_prep.clusters import member_name
from data_prep.duplicates import DigestSet
from data_prep.encode import DIGEST_BYTES
from data_prep.interruption import sigterm_as_interrupt
from data_prep.lock import BuildLock
from data_prep.mmseqs import find_mmseqs, run_mmseqs
from protlm.data.records import ReadOptions, Record, SequenceFile, Tally
from protlm.errors import InputDataError, UserError
from protlm.lock import LOCK
from protlm.paths import complete_file, existing_file, explain_os_error

# As in UniRef: so much of a member lies on the longer sequence that stands for the cluster.
_COVERAGE = ("-c", "0.8", "--cov-mode", "1")


@dataclass(frozen=True)
class Clustering:
    """How the sources are clustered.

    Args:
        identity: the least share of identical residues between a member and its representative.
        reading: what is taken of the sources besides what is right.
        break_lock: takes over what a process of another machine was clustering.

    Raises:
        UserError: there is no such identity.
    """

    identity: float = 0.5
    reading: ReadOptions = field(default_factory=ReadOptions)
    break_lock: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.identity <= 1:
            raise UserError(f"--cluster-identity {self.identity} must be above 0 and at most 1")


def cluster_sources(sources: Sequence[Path], out: Path, clustering: Clustering) -> Path:
    """Makes the table of clusters beside `out`, or finds it there from an earlier run.

    Its name tells the sources, as they are now, and the settings: `OUT.clusters-1a2b3c4d.tsv`.

    Args:
        sources: sequence files of any format.
        out: the data set that is to be made; the temporary files lie on its disk.
        clustering: how to cluster.

    Raises:
        UserError: standard input is among the sources, or MMseqs2 is not installed.
        InputDataError: a source cannot be read, or changes, or MMseqs2 fails.
        OutputError: another process clusters for `out`, no space, or no permission.
    """
    if Path("-") in sources:
        raise UserError(
            "--cluster reads the sources twice, and standard input can be read only once: write it "
            "to a file first"
        )
    fingerprint = _fingerprint(sources, clustering)
    table = out.with_name(f"{out.name}.clusters-{fingerprint}.tsv")
    if table.is_file():
        print(f"the clusters are there from an earlier run: {table}", file=sys.stderr)
        return table
    find_mmseqs()
    folder = table.with_name(f"{table.name}.partial").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = BuildLock(folder, break_lock=clustering.break_lock)
    except OSError as error:
        raise explain_os_error(error, folder) from error
    with sigterm_as_interrupt():
        try:
            _empty(folder)
            print("clustering with MMseqs2: hours for TrEMBL", file=sys.stderr, flush=True)
            with complete_file(table) as temporary:
                made = _linclust(sources, folder, clustering)
                # Who took over writes there too: its table may be half there.
                lock.check()
                made.replace(temporary)
                if _fingerprint(sources, clustering) != fingerprint:
                    raise InputDataError(
                        "a source changed while it was clustered; when it is complete, type the "
                        "same command again"
                    )
        finally:
            if lock.is_held:
                shutil.rmtree(folder)
    return table


def _linclust(sources: Sequence[Path], folder: Path, clustering: Clustering) -> Path:
    """Clusters in `folder`, and returns the table."""
    fasta, clusters = folder / "sources.fasta", folder / "linclust"
    # MMseqs2 gets the records as we read them: each format, and each identifier, as it is here.
    with fasta.open("x", encoding="utf-8") as file:
        names = _Names(folder)
        for source in sources:
            with SequenceFile(source, clustering.reading) as opened:
                for block in opened.blocks():
                    records = list(block.records(Tally()))
                    names.add(records, source)
                    file.writelines(f">{r.identifier}\n{r.sequence}\n" for r in records)
    identity = ["--min-seq-id", str(clustering.identity)]
    run_mmseqs(["easy-linclust", fasta, clusters, folder / "tmp", *identity, *_COVERAGE])
    return clusters.with_name(f"{clusters.name}_cluster.tsv")


class _Names:
    """Refuses a name of two sequences before hours of clustering: the table knows names alone.

    Args:
        folder: where tables of digests lie when they are large.
    """

    def __init__(self, folder: Path) -> None:
        self._names = DigestSet(folder / "names.table")
        self._records = DigestSet(folder / "records.table")

    def add(self, records: Sequence[Record], source: Path) -> None:
        """Adds the records of a block of a source.

        Raises:
            InputDataError: one has the name of another.
            OSError: the disk is full.
        """
        names = [member_name(record.identifier) for record in records]
        is_new_name = self._names.add(_digests(names))
        pairs = zip(names, records, strict=True)
        is_new = self._records.add(_digests(f"{name} {one.sequence}" for name, one in pairs))
        if (found := np.flatnonzero(is_new & ~is_new_name)).size:
            record = records[int(found[0])]
            raise InputDataError(
                f"{source}, line {record.line}: {record.identifier!r:.80} is the name of another "
                "sequence too, and clusters are known by names: give each its own, or leave "
                "--cluster out"
            )


def _digests(texts: Iterable[str]) -> np.ndarray:
    """Hashes of the texts, uint64 [n, 2]."""
    digests = (blake2b(text.encode(), digest_size=DIGEST_BYTES).digest() for text in texts)
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


def _fingerprint(sources: Sequence[Path], clustering: Clustering) -> str:
    """What the clusters depend on, in eight letters."""
    digest = blake2b(repr((clustering.identity, clustering.reading)).encode(), digest_size=4)
    for source in sources:
        status = existing_file(source, "a sequence file").stat()
        digest.update(os.fsencode(source.absolute()))
        digest.update(f"\n{status.st_size}\n{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _empty(folder: Path) -> None:
    """Removes what a killed process left."""
    for entry in folder.iterdir():
        if entry.name != LOCK:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
