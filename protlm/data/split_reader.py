"""Random access to the sequences of a split, through memory maps."""

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from protlm.data.manifest import ShardEntry
from protlm.data.shard_map import MappedShard, Places, find_arrays, map_shard

# Python keeps a descriptor for each memory map, and a process commonly has 1,024 of them.
_MAX_MAPPED = 128


class SplitReader:
    """Random access to the sequences of one split.

    Shards are mapped into memory when first asked for, the most recent 128 of them at a time; a
    pickled reader takes no maps along.

    Args:
        directory: the folder of the data set.
        shards: the entries of the split in the manifest, in order.
        shuffled: sequences will be asked for in a random order.
    """

    def __init__(
        self, directory: Path, shards: Sequence[ShardEntry], *, shuffled: bool = False
    ) -> None:
        self._directory, self._shards, self._shuffled = directory, tuple(shards), shuffled
        counts = np.array([shard.sequences for shard in shards], dtype=np.int64)
        self._ends: list[int] = np.cumsum(counts).tolist()
        self._maps: OrderedDict[int, MappedShard] = OrderedDict()
        self._places: dict[int, Places] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": OrderedDict()}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of the residues of a sequence, uint8, a read-only view.

        Raises:
            InputDataError: the shard is missing, damaged, or none of ours.
        """
        shard, row = self._locate(index)
        return shard.sequence(row)

    def identifier(self, index: int) -> str:
        """The accession, or whatever the record was called.

        Raises:
            InputDataError: the shard is missing, damaged, or none of ours.
        """
        shard, row = self._locate(index)
        return shard.identifier(row).decode("utf-8", "backslashreplace")

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the hashes of the shards, in order: what a place in the data refers to."""
        return hashlib.sha256("\n".join(s.sha256 for s in self._shards).encode()).hexdigest()

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Residues of these sequences, int64; reads their offsets alone, shard by shard.

        Raises:
            InputDataError: a shard is missing, damaged, or none of ours.
        """
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
        """How many sequences have 0, 1, 2... residues, int64; reads all offsets.

        Raises:
            InputDataError: a shard is missing, damaged, or none of ours.
        """
        totals = np.zeros(1, dtype=np.int64)
        for number in range(len(self._shards)):
            counts = np.bincount(self._shard(number).lengths(slice(None)), minlength=len(totals))
            counts[: len(totals)] += totals
            totals = counts
        return totals

    def _first(self, number: int) -> int:
        return self._ends[number - 1] if number else 0

    def _locate(self, index: int) -> tuple[MappedShard, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        return self._shard(number), index - self._first(number)

    def _shard(self, number: int) -> MappedShard:
        shard = self._maps.get(number)
        if shard is not None:
            self._maps.move_to_end(number)
            return shard
        entry = self._shards[number]
        path = self._directory / entry.file
        if number not in self._places:
            self._places[number] = find_arrays(path, entry)
        shard = map_shard(path, entry, self._places[number], shuffled=self._shuffled)
        self._maps[number] = shard
        if len(self._maps) > _MAX_MAPPED:
            self._maps.popitem(last=False)
        return shard
