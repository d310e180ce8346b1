"""The cluster index of a split: the sequences of each cluster, mapped into memory."""

import mmap
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from protlm.data.shards.manifest import IndexEntry
from protlm.data.shards.mapped_shard import READING_FAULTS, check_size, map_arrays, places_of
from protlm.system.errors import InputDataError
from protlm.system.paths import sha256_of

ARRAYS = {"offsets": "<u8", "members": "<u8"}
# Numbers checked at a time, so that the check takes little memory.
_BLOCK = 1 << 22
# Clusters looked up between two releases of the pages; each lookup loads up to 128 KiB.
_LOOKUPS = 1 << 8


class _Mapped(NamedTuple):
    pages: mmap.mmap
    offsets: np.ndarray
    members: np.ndarray


@final
class ClusterIndex:
    """The sequences of each cluster of a split; reads only the requested clusters."""

    def __init__(self, path: Path, entry: IndexEntry, num_sequences: int) -> None:
        self._path, self._entry, self._num_sequences = path, entry, num_sequences

    def __len__(self) -> int:
        return self._entry.clusters

    @property
    def fingerprint(self) -> str:
        return self._entry.sha256

    def members(self, clusters: np.ndarray, starts: np.ndarray, turn: int) -> np.ndarray:
        """Returns the member of each of these clusters whose turn it is, a sequence number, int64.

        `starts` modulo the sizes of the clusters are the first members in turn, and `turn` is the
        number of earlier turns.
        """
        arrays = self._arrays()
        members = np.empty(len(clusters), np.int64)
        for start in range(0, len(clusters), _LOOKUPS):
            here = slice(start, start + _LOOKUPS)
            begins, sizes = self._spans(arrays, clusters[here])
            # Each is reduced modulo the size first, so that the sum cannot overflow.
            numbers = (starts[here] % sizes + np.uint64(turn) % sizes) % sizes
            found = arrays.members[begins + numbers]
            if np.any(found >= self._num_sequences):
                raise _damaged(self._path, "a member is not a sequence of the split")
            members[here] = found
            release(arrays.pages)
        return members

    def sizes(self, clusters: np.ndarray | slice) -> np.ndarray:
        """Returns the number of members of each of these clusters, int64."""
        arrays = self._arrays()
        _, sizes = self._spans(arrays, clusters)
        release(arrays.pages)
        return sizes.astype(np.int64)

    def starts(self, most: int) -> np.ndarray:
        """Returns the number of documents before each cluster, and their total at the end.

        A document has up to `most` members of one cluster. This reads all offsets; the result has
        four bytes for each cluster, 200 MB for 50 million.
        """
        # As many as members at most.
        starts = np.zeros(len(self) + 1, np.min_scalar_type(self._num_sequences))
        for first in range(0, len(self), _BLOCK):
            here = slice(first, first + _BLOCK)
            ends = np.cumsum(-(-self.sizes(here) // most)) + int(starts[first])
            starts[first + 1 : first + 1 + len(ends)] = ends
        return starts

    def _spans(
        self, arrays: _Mapped, clusters: np.ndarray | slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the place of the first member of each cluster, and its size, uint64."""
        begins, ends = arrays.offsets[:-1][clusters], arrays.offsets[1:][clusters]
        if np.any(ends <= begins) or np.any(ends > len(arrays.members)):
            raise _damaged(self._path, "the offsets do not increase")
        return begins, ends - begins

    def check(self) -> None:
        """Checks the hash, all offsets and all members."""
        self.check_size()
        try:
            if sha256_of(self._path) != self._entry.sha256:
                raise InputDataError(
                    f"the cluster index {self._path} is damaged or was replaced: its SHA-256 "
                    "differs"
                )
        except OSError as error:
            raise _damaged(self._path, str(error.strerror)) from error
        arrays = self._arrays()
        for start in range(0, len(self), _BLOCK):
            self._spans(arrays, slice(start, start + _BLOCK))
        for start in range(0, len(arrays.members), _BLOCK):
            if np.any(arrays.members[start : start + _BLOCK] >= self._num_sequences):
                raise _damaged(self._path, "a member is not a sequence of the split")

    def check_size(self) -> None:
        check_size(self._path, self._entry)

    def _arrays(self) -> _Mapped:
        arrays = _mapped(self._path, self._entry, self._num_sequences)
        if arrays.pages.size() < len(arrays.pages):
            raise _damaged(self._path, "it was truncated while it was read")
        return arrays


def release(pages: mmap.mmap | None) -> None:
    """Leaves the mapped pages of a file, if there are any, to the cache of the system."""
    if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)


@lru_cache
def _mapped(path: Path, entry: IndexEntry, num_sequences: int) -> _Mapped:
    """Maps the arrays of an index; checks only the first and the last offset."""
    check_size(path, entry)
    try:
        pages, views = map_arrays(path, ARRAYS, places_of(path, ARRAYS, entry.bytes), shuffled=True)
        arrays = _Mapped(pages, **views)
    except READING_FAULTS as error:
        raise _damaged(path, str(error)) from error
    if len(arrays.members) != num_sequences:
        raise _damaged(path, f"{len(arrays.members)} members instead of {num_sequences}")
    offsets = arrays.offsets
    if len(offsets) != entry.clusters + 1 or offsets[0] != 0 or offsets[-1] != num_sequences:
        raise _damaged(path, "the offsets do not cover the members")
    return arrays


def _damaged(path: Path, why: str) -> InputDataError:
    return InputDataError(f"the cluster index {path} is damaged or was replaced ({why})")
