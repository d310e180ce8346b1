"""Opening of data sets, verification against the manifest, and random access to a split."""

import hashlib
import resource
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np

from protlm.data.shards.cluster_index import ClusterIndex
from protlm.data.shards.manifest import (
    MANIFEST,
    MANIFEST_SHA256,
    Manifest,
    ShardEntry,
    read_manifest,
)
from protlm.data.shards.mapped_shard import MappedShard, find_arrays, map_shard, size_fault
from protlm.system.errors import InputDataError, UserError, one_of
from protlm.system.paths import sha256_of
from protlm.system.terminal import watched

REPORT, REJECTED = "report.json", "rejected.tsv"
_Numbers: TypeAlias = Callable[[MappedShard, np.ndarray], np.ndarray]


class SplitReader:
    """Random access to the sequences of a split.

    Shards are mapped into memory on first use. The most recently used ones stay mapped, up to half
    of the file descriptors of the process (512 of the usual 1,024; `ulimit -n`).
    """

    def __init__(self, shards: Sequence[tuple[Path, ShardEntry, bool]]) -> None:
        # Of each its path, its entry, and whether it is read in random order.
        self.shards = tuple(shards)
        counts = np.array([entry.sequences for _, entry, _ in shards], dtype=np.int64)
        self._ends: list[int] = np.cumsum(counts).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns residue tokens, uint8, as a read-only view."""
        shard, row = self._locate(index)
        return shard.sequence(row)

    def identifier(self, index: int) -> str:
        shard, row = self._locate(index)
        return shard.identifier(row).decode("utf-8", "backslashreplace")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the hashes of the shards, in order; identifies the data of a position."""
        hashes = "\n".join(entry.sha256 for _, entry, _ in self.shards)
        return hashlib.sha256(hashes.encode()).hexdigest()

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Returns the lengths of these sequences, int64; reads only their offsets."""
        return self._read(samples, MappedShard.lengths, np.int64)

    def clusters_of(self, samples: np.ndarray) -> np.ndarray:
        """Returns the hashes of the clusters of these sequences, uint64, if they are stored."""
        return self._read(samples, MappedShard.cluster_hashes, np.uint64)

    def _read(self, samples: np.ndarray, read: _Numbers, kind: type) -> np.ndarray:
        """Returns a number of each of these sequences, which `read` takes from their shard."""
        if len(samples) and not (samples.min() >= 0 and samples.max() < len(self)):
            raise IndexError(f"sequences {samples.min()} to {samples.max()} of {len(self)}")
        found = np.empty(len(samples), dtype=kind)
        numbers = np.searchsorted(self._ends, samples, side="right")
        by_shard = np.argsort(numbers, kind="stable")
        firsts = np.flatnonzero(np.diff(numbers[by_shard])) + 1
        for places in np.split(by_shard, firsts) if len(samples) else ():
            number = int(numbers[places[0]])
            found[places] = read(self._shard(number), samples[places] - self._first(number))
        return found

    def length_counts(self) -> np.ndarray:
        """Counts the sequences with 0, 1, 2, ... residues, int64; reads all offsets."""
        totals = np.zeros(1, dtype=np.int64)
        for number in range(len(self.shards)):
            counts = np.bincount(self._shard(number).lengths(slice(None)), minlength=len(totals))
            counts[: len(totals)] += totals
            totals = counts
        return totals

    def size_fault(self) -> str:
        """Returns why a shard cannot match the manifest by its size, or an empty string."""
        faults = (size_fault(path, entry) for path, entry, _ in self.shards)
        return next(filter(None, faults), "")

    def _first(self, number: int) -> int:
        return self._ends[number - 1] if number else 0

    def _locate(self, index: int) -> tuple[MappedShard, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        return self._shard(number), index - self._first(number)

    def _shard(self, number: int) -> MappedShard:
        return _mapped(*self.shards[number])


def _most_maps() -> int:
    """Returns the maximum number of memory maps: half of the available file descriptors.

    Python keeps a descriptor for each map. Linux allows about 65,000 maps per process.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(soft if soft != resource.RLIM_INFINITY else 1 << 15, 1 << 15) // 2


def open_split(
    directory: Path, split: str, *, verify: str = "full", shuffled: bool = False
) -> SplitReader:
    """Opens a split, whose sequences will perhaps be read in random order, and checks its shards.

    `full` compares sizes and hashes with the manifest and checks every number; `sizes` compares
    only sizes, and the structure of a shard is checked on first use.
    """
    manifest = _manifest_with(directory, split)
    if not any(entry.sequences for entry in manifest.splits[split]):
        raise InputDataError(f"the split {split} of {directory} is empty; choose another one")
    for entry in manifest.splits[split]:
        path = directory / entry.file
        fault = size_fault(path, entry) if verify == "sizes" else _fault(path, entry)
        if fault:
            raise InputDataError(
                f"{fault}; see: protlm data verify {directory}; or make the data set again"
            )
    return SplitReader([(directory / one.file, one, shuffled) for one in manifest.splits[split]])


def open_clusters(directory: Path, split: str, *, verify: str = "full") -> ClusterIndex:
    """Opens the cluster index of a split after checking it."""
    manifest = _manifest_with(directory, split)
    if manifest.clusters is None:
        raise UserError(
            f"{directory} was prepared without clusters, which data.batching=relatives and "
            "data.sampling=cluster need; prepare it again with the option cluster (docs/prepare.md)"
        )
    index = _index(directory, manifest, split)
    try:
        index.check() if verify == "full" else index.check_size()
    except InputDataError as error:
        raise InputDataError(
            f"{error}; see: protlm data verify {directory}; or make the data set again"
        ) from error
    return index


def _index(directory: Path, manifest: Manifest, split: str) -> ClusterIndex:
    assert manifest.clusters is not None
    entry = manifest.clusters.indexes[split]
    num_sequences = sum(shard.sequences for shard in manifest.splits[split])
    return ClusterIndex(directory / entry.file, entry, num_sequences)


def check_splits(directory: str | None, splits: object) -> None:
    """Refuses splits, or one, that a data set lacks, if it is there."""
    if directory is not None and (Path(directory) / MANIFEST).is_file():
        for split in splits if isinstance(splits, list) else filter(None, [splits]):
            _manifest_with(Path(directory), str(split))


def _manifest_with(directory: Path, split: str) -> Manifest:
    manifest = read_manifest(directory)
    if split not in manifest.splits:
        raise UserError(
            f"{directory} has no split {split!r}; it has: {one_of(list(manifest.splits))}; protlm "
            "prepare makes valid and test, if their fractions are not 0"
        )
    return manifest


def verify(directory: Path) -> list[str]:
    """Checks a data set completely, and returns one sentence per fault."""
    manifest = read_manifest(directory)
    entries = [entry for shards in manifest.splits.values() for entry in shards]
    indexes = manifest.clusters.indexes if manifest.clusters else {}
    expected = {
        MANIFEST,
        MANIFEST_SHA256,
        REPORT,
        REJECTED,
        *(entry.file for entry in [*entries, *indexes.values()]),
    }
    checked = watched("shards checked", entries)
    faults = [*filter(None, (_fault(directory / entry.file, entry) for entry in checked))]
    for split in indexes:
        try:
            _index(directory, manifest, split).check()
        except InputDataError as error:
            faults.append(str(error))
    others = [
        path
        for path in sorted(directory.rglob("*"))
        if not path.is_dir() and path.relative_to(directory).as_posix() not in expected
    ]
    return faults + [f"{path} is not in the manifest" for path in others]


def _fault(path: Path, entry: ShardEntry) -> str:
    """Returns why a file does not match its manifest entry, or an empty string.

    HDF5 opens the file only after its size and its hash were verified.
    """
    if fault := size_fault(path, entry):
        return fault
    try:
        if sha256_of(path) != entry.sha256:
            return f"the shard {path} is damaged or was replaced: its SHA-256 differs"
        map_shard(path, entry, find_arrays(path, entry)).check()
    except OSError as error:
        return f"the shard {path} cannot be read: {error.strerror}"
    except InputDataError as error:
        return str(error)
    return ""


_places = cache(find_arrays)


@lru_cache(_most_maps())
def _mapped(path: Path, entry: ShardEntry, shuffled: bool) -> MappedShard:
    """Returns a mapped shard; all readers of a process share the limited number of maps."""
    return map_shard(path, entry, _places(path, entry), shuffled=shuffled)
