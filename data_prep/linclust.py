"""Clustering of the sources by MMseqs2 linclust, in time linear in their size."""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

from protlm.data.records import ReadOptions, Record, SequenceFile, Tally
from protlm.system.errors import InputDataError, UserError
from protlm.system.interruption import sigterm_as_interrupt
from protlm.system.paths import existing_file
from protlm.system.terminal import printable
from protlm.system.work_folder import Kind, unfinished, work_folder

from .clusters import member_name
from .duplicates import DigestSet
from .encode import DIGEST_BYTES
from .mmseqs import find_mmseqs, run_mmseqs

# As in UniRef: the fraction of a member that aligns with the longer representative.
_COVERAGE = ("-c", "0.8", "--cov-mode", "1")
# The folder is always removed: what MMseqs2 leaves there cannot be continued.
_CLUSTERING = Kind("clustering", "being built", "--out", has_finished=lambda folder: False)


@dataclass(frozen=True)
class Clustering:
    """`identity` is the minimum fraction of residues identical in member and representative."""

    identity: float = 0.5
    reading: ReadOptions = field(default_factory=ReadOptions)
    break_lock: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.identity <= 1:
            raise UserError(f"--cluster-identity {self.identity} must be above 0 and at most 1")


def cluster_sources(sources: Sequence[Path], out: Path, clustering: Clustering) -> Path:
    """Writes the cluster table next to `out`, or returns the table of an earlier run.

    Its name has a hash of the sources' states and of the settings: `OUT.clusters-1a2b3c4d.tsv`.
    """
    if Path("-") in sources:
        raise UserError(
            "--cluster reads the sources twice, and standard input can be read only once: write it "
            "to a file first"
        )
    fingerprint = _fingerprint(sources, clustering)
    table = out.with_name(f"{out.name}.clusters-{fingerprint}.tsv")
    if table.is_file():
        print(printable(f"using the clusters of an earlier run: {table}"), file=sys.stderr)
        return table
    find_mmseqs()
    folder = unfinished(table.absolute())
    with (
        sigterm_as_interrupt(),
        work_folder(folder, {}, _CLUSTERING, break_lock=clustering.break_lock) as work,
    ):
        print("clustering with MMseqs2: hours for TrEMBL", file=sys.stderr, flush=True)
        made = _linclust(sources, folder, clustering)
        if _fingerprint(sources, clustering) != fingerprint:
            raise InputDataError(
                "a source changed while it was clustered; when it is complete, type the same "
                "command again"
            )
        work.publish(made, table)
    return table


def _linclust(sources: Sequence[Path], folder: Path, clustering: Clustering) -> Path:
    fasta, clusters = folder / "sources.fasta", folder / "linclust"
    # MMseqs2 reads the records as protlm does, whatever their format, with the same identifiers.
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
    """Rejects two sequences with the same name, because the cluster table has only names."""

    def __init__(self, folder: Path) -> None:
        self._names = DigestSet(folder / "names.table")
        self._records = DigestSet(folder / "records.table")

    def add(self, records: Sequence[Record], source: Path) -> None:
        names = [member_name(record.identifier) for record in records]
        is_new_name = self._names.add(_digests(names))
        pairs = zip(names, records, strict=True)
        is_new = self._records.add(_digests(f"{name} {one.sequence}" for name, one in pairs))
        if (found := np.flatnonzero(is_new & ~is_new_name)).size:
            record = records[int(found[0])]
            raise InputDataError(
                f"{source}, line {record.line}: {record.identifier!r:.80} is the name of another "
                "sequence too, and clusters are identified by names: rename one, or omit --cluster"
            )


def _digests(texts: Iterable[str]) -> np.ndarray:
    """Returns the hashes of the texts, uint64 [n, 2]."""
    digests = (blake2b(text.encode(), digest_size=DIGEST_BYTES).digest() for text in texts)
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


def _fingerprint(sources: Sequence[Path], clustering: Clustering) -> str:
    """Returns a hash, in eight letters, of everything that the clusters depend on."""
    digest = blake2b(repr((clustering.identity, clustering.reading)).encode(), digest_size=4)
    for source in sources:
        status = existing_file(source, "a sequence file").stat()
        digest.update(os.fsencode(source.absolute()))
        digest.update(f"\n{status.st_size}\n{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
