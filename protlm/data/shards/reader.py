"""Random access to the sequences of a split, through memory maps."""

import hashlib
import resource
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from protlm.data.shards.manifest import ShardEntry
from protlm.data.shards.mapped_shard import MappedShard, Places, find_arrays, map_shard, size_fault


def _most_maps() -> int:
    """Returns the maximum number of memory maps: half of the available file descriptors.

    Python keeps a descriptor for each map. Linux allows about 65,000 maps per process.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(soft if soft != resource.RLIM_INFINITY else 1 << 15, 1 << 15) // 2


@cache
def _places(path: Path, entry: ShardEntry) -> Places:
    return find_arrays(path, entry)


@lru_cache(_most_maps())
def _mapped(path: Path, entry: ShardEntry, shuffled: bool) -> MappedShard:
    """Returns a mapped shard; all readers of a process share the limited number of maps."""
    return map_shard(path, entry, _places(path, entry), shuffled=shuffled)


class SplitReader:
    """Random access to the sequences of one split.

    Shards are mapped into memory on first use. The most recently used ones stay mapped, up to half
    of the file descriptors of the process (512 of the usual 1,024; `ulimit -n`).

    Args:
        directory: the folder of the data set.
        shards: manifest entries of the split, in order.
        shuffled: sequences will be read in random order.
    """

    def __init__(
        self, directory: Path, shards: Sequence[ShardEntry], *, shuffled: bool = False
    ) -> None:
        self._shards, self._shuffled = tuple(shards), shuffled
        self._paths = [directory / shard.file for shard in shards]
        counts = np.array([shard.sequences for shard in shards], dtype=np.int64)
        self._ends: list[int] = np.cumsum(counts).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns the residue tokens of a sequence, uint8, as a read-only view."""
        shard, row = self._locate(index)
        return shard.sequence(row)

    def identifier(self, index: int) -> str:
        """Returns the accession, or other identifier, of a sequence."""
        shard, row = self._locate(index)
        return shard.identifier(row).decode("utf-8", "backslashreplace")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the hashes of the shards, in order; identifies the data of a position."""
        return hashlib.sha256("\n".join(s.sha256 for s in self._shards).encode()).hexdigest()

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Returns the lengths of these sequences, int64; reads only their offsets."""
        if len(samples) and not (samples.min() >= 0 and samples.max() < len(self)):
            raise IndexError(f"sequences {samples.min()} to {samples.max()} of {len(self)}")
        lengths = np.empty(len(samples), dtype=np.int64)
        numbers = np.searchsorted(self._ends, samples, side="right")
        by_shard = np.argsort(numbers, kind="stable")
        firsts = np.flatnonzero(np.diff(numbers[by_shard])) + 1
        for places in np.split(by_shard, firsts) if len(samples) else ():
            number = int(numbers[places[0]])
            lengths[places] = self._shard(number).lengths(samples[places] - self._first(number))
        return lengths

    def length_counts(self) -> np.ndarray:
        """Counts the sequences with 0, 1, 2, ... residues, int64; reads all offsets."""
        totals = np.zeros(1, dtype=np.int64)
        for number in range(len(self._shards)):
            counts = np.bincount(self._shard(number).lengths(slice(None)), minlength=len(totals))
            counts[: len(totals)] += totals
            totals = counts
        return totals

    def size_fault(self) -> str:
        """Returns why a shard cannot match the manifest by its size, or an empty string."""
        return next(filter(None, map(size_fault, self._paths, self._shards)), "")

    def _first(self, number: int) -> int:
        return self._ends[number - 1] if number else 0

    def _locate(self, index: int) -> tuple[MappedShard, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        return self._shard(number), index - self._first(number)

    def _shard(self, number: int) -> MappedShard:
        return _mapped(self._paths[number], self._shards[number], self._shuffled)
