"""MMseqs2, run as an external program: clusters of sequences and of sources, and homologs."""

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from protlm.data.records import Record, Tally, read_records
from protlm.data.records.record import accession
from protlm.data.tables import read_clusters
from protlm.data.vocabulary import VOCABULARY
from protlm.options.prepare import PrepareOptions, ReadOptions
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.interruption import sigterm_as_interrupt
from protlm.system.paths import existing_file, explain_os_error, scratch_name
from protlm.system.terminal import printable
from protlm.system.work_folder import Kind, unfinished, work_folder

from .duplicates import DigestSet
from .encode import DIGEST_BYTES, digest_of, selected
from .families import OOD_FAMILY
from .split import TRAIN, SplitRule

MIN_IDENTITY, MAX_E_VALUE = 0.3, 1e-3
# Of the shorter and of the longer sequence of a pair.
_COVERAGE = ("-c", "0.8", "--cov-mode", "0")
_LAST_LINES = 3
# Records whose names are compared at a time.
_AT_A_TIME = 1 << 14
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


def run_mmseqs(arguments: Sequence[str | Path]) -> str:
    """Runs MMseqs2 quietly, and returns what it prints.

    It ends with this process, and so do the processes that it starts.
    """
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
        return printed[0].decode(errors="backslashreplace").strip()
    lines = [
        line.strip()
        for line in b"".join(printed).decode(errors="backslashreplace").splitlines()
        if line.strip()
    ]
    reason = "; ".join(lines[-_LAST_LINES:]) or "it printed nothing"
    kind = OutputError if "no space" in reason.lower() else InputDataError
    raise kind(f"mmseqs {arguments[0]} ended with {process.returncode}: {reason}")


def cluster_sequences(sequences: Sequence[str]) -> list[int]:
    """Returns the number of each sequence's cluster: the row of its representative."""
    find_mmseqs()
    clusters = list(range(len(sequences)))
    with _scratch("protlm-clusters") as folder:
        fasta = _write_fasta(sequences, folder / "sequences.fasta")
        options = ("--min-seq-id", str(MIN_IDENTITY), *_COVERAGE)
        run_mmseqs(["easy-cluster", fasta, folder / "found", folder / "tmp", *options])
        for _, representative, member in read_clusters(folder / "found_cluster.tsv"):
            clusters[int(member)] = int(representative)
    return clusters


def highest_identities(queries: Sequence[np.ndarray], others: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the highest identity of each query's hits with E < 1e-3, float64; NaN without one."""
    identities = np.full(len(queries), np.nan)
    with _scratch("protlm-leakage") as folder:
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
def _scratch(name: str) -> Iterator[Path]:
    """Yields a temporary folder (`TMPDIR`), which is removed when a cluster ends the job, too.

    Its files may be as large as a data set.
    """
    with sigterm_as_interrupt(), TemporaryDirectory(**scratch_name(name)) as folder:
        yield Path(folder)


def _write_fasta(sequences: Iterable[str], path: Path) -> Path:
    try:
        with path.open("x", encoding="ascii") as file:
            for number, sequence in enumerate(sequences):
                file.write(f">{number}\n{sequence}\n")
    except OSError as error:
        raise explain_os_error(error, path.parent) from error
    return path


# The folder is always removed: what MMseqs2 leaves there cannot be continued.
_TABLE = Kind("table", "being made", "--out", has_finished=lambda folder: False)
# Queries are the held-out sequences: they are few, and the coverage is theirs.
_HOMOLOGS = (
    *("--min-seq-id", str(MIN_IDENTITY), "-c", "0.8", "--cov-mode", "2"),
    *("-s", "7.5", "--format-output", "target"),
)


@dataclass(frozen=True)
class Clustering:
    """Fractions of a member: identical to its representative, and aligned to it, at least."""

    identity: float = 0.5
    coverage: float = 0.8
    reading: ReadOptions = field(default_factory=ReadOptions)
    break_lock: bool = False


def cluster_sources(sources: Sequence[Path], out: Path, clustering: Clustering) -> tuple[Path, str]:
    """Writes the cluster table next to `out`, or returns that of an earlier run, and the version.

    Its name has a hash of the sources' states, of the settings, and of the version of MMseqs2:
    `OUT.clusters-1a2b3c4d.tsv`.
    """
    settings = (clustering.identity, clustering.coverage, clustering.reading)

    def make(folder: Path) -> Path:
        print(
            "clustering with MMseqs2: seconds for thousands of proteins, hours for TrEMBL",
            file=sys.stderr,
            flush=True,
        )
        return _linclust(sources, folder, clustering)

    return _beside(out, "clusters", sources, settings, make, break_lock=clustering.break_lock)


def find_homologs(
    sources: Sequence[Path], out: Path, rule: SplitRule, options: PrepareOptions
) -> tuple[Path, str]:
    """Writes the training sequences too close to a held-out one next to `out`, by their digests.

    They are in lines of a file, or in that of an earlier run, as of `cluster_sources`.
    """
    reading, selection = options.reading, options.selection
    settings = (rule.describe(), reading, selection, _HOMOLOGS)

    def make(folder: Path) -> Path:
        print("searching for homologs with MMseqs2: hours", file=sys.stderr, flush=True)
        files = {split: folder / f"{split}.fasta" for split in (OOD_FAMILY, TRAIN)}
        numbers = Counter[str]()
        with ExitStack() as stack:
            opened = {split: stack.enter_context(file.open("x")) for split, file in files.items()}
            for source in sources:
                for record in selected(read_records(source, Tally(), reading), selection, Tally()):
                    digest = digest_of(record)
                    if (split := rule.split_of(record, digest)) in opened:
                        opened[split].write(f">{digest.hex()}\n{record.sequence}\n")
                        numbers[split] += 1
        if len(numbers) < len(files):
            raise InputDataError(
                f"--no-homologs needs sequences in {TRAIN} and in {OOD_FAMILY}, but one is empty; "
                "give another table, or leave the flag out"
            )
        hits = folder / "hits"
        # Otherwise, of a query with many hits, only the first 300 count.
        every = ["--max-seqs", str(numbers[TRAIN])]
        run_mmseqs(["easy-search", *files.values(), hits, folder / "tmp", *_HOMOLOGS, *every])
        return hits

    return _beside(out, "homologs", sources, settings, make, break_lock=options.break_lock)


def _beside(
    out: Path,
    what: str,
    sources: Sequence[Path],
    settings: Sequence[object],
    make: Callable[[Path], Path],
    *,
    break_lock: bool,
) -> tuple[Path, str]:
    """Returns a table that is kept next to `out`, or made there, and the version of MMseqs2."""
    if Path("-") in sources:
        raise UserError(
            "MMseqs2 and protlm both read the sources, and standard input can be read only once: "
            "write it to a file first"
        )
    states = _states(sources)
    version = run_mmseqs(["version"])
    fingerprint = blake2b(repr((settings, states, version)).encode(), digest_size=4).hexdigest()
    table = out.with_name(f"{out.name}.{what}-{fingerprint}.tsv")
    if table.is_file():
        print(printable(f"using the {what} of an earlier run: {table}"), file=sys.stderr)
        return table, version
    folder = unfinished(table.absolute())
    with sigterm_as_interrupt(), work_folder(folder, {}, _TABLE, break_lock=break_lock) as work:
        made = make(folder)
        if _states(sources) != states:
            raise InputDataError(
                "a source changed while MMseqs2 ran; when it is complete, type the same command "
                "again"
            )
        work.publish(made, table)
    return table, version


def _linclust(sources: Sequence[Path], folder: Path, clustering: Clustering) -> Path:
    fasta, clusters = folder / "sources.fasta", folder / "linclust"
    with fasta.open("x", encoding="utf-8") as file:
        names = _Names(folder)
        for source in sources:
            every = read_records(source, Tally(), clustering.reading)
            while records := [*islice(every, _AT_A_TIME)]:
                names.add(records, source)
                file.writelines(f">{r.identifier}\n{r.sequence}\n" for r in records)
    # As in UniRef: the fraction of a member that aligns with the longer representative.
    least = ["-c", str(clustering.coverage), "--cov-mode", "1"]
    identity = ["--min-seq-id", str(clustering.identity)]
    run_mmseqs(["easy-linclust", fasta, clusters, folder / "tmp", *identity, *least])
    return clusters.with_name(f"{clusters.name}_cluster.tsv")


class _Names:
    """Rejects two sequences with the same name, because the cluster table has only names."""

    def __init__(self, folder: Path) -> None:
        self._names = DigestSet(folder / "names.table")
        self._records = DigestSet(folder / "records.table")

    def add(self, records: Sequence[Record], source: Path) -> None:
        names = [accession(record.identifier) for record in records]
        is_new_name = self._names.add(_digests(names))
        pairs = zip(names, records, strict=True)
        is_new = self._records.add(_digests(f"{name} {one.sequence}" for name, one in pairs))
        if (found := np.flatnonzero(is_new & ~is_new_name)).size:
            record = records[int(found[0])]
            raise InputDataError(
                f"{source}, line {record.line}: {record.identifier!r:.80} is the name of another "
                "sequence too, and clusters are identified by names: rename one",
                {"cluster": None},
            )


def _digests(texts: Iterable[str]) -> np.ndarray:
    """Returns the hashes of the texts, uint64 [n, 2]."""
    digests = (blake2b(text.encode(), digest_size=DIGEST_BYTES).digest() for text in texts)
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


def _states(sources: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Returns the path, the size and the time of each source."""
    found = [(one, existing_file(one, "a sequence file").stat()) for one in sources]
    return [(str(one.absolute()), status.st_size, status.st_mtime_ns) for one, status in found]
