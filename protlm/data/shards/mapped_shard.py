"""A memory-mapped shard: HDF5 provides the positions of the arrays, but does not read them.

An HDF5 file can be crafted to read other files or to crash its reader, so a file is opened only if
its size matches the manifest, and anything that could refer to other files is rejected.
"""

import mmap
from pathlib import Path
from typing import NamedTuple, TypeAlias

import h5py
import numpy as np

from protlm.data.shards.manifest import IndexEntry, ShardEntry
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import InputDataError

ARRAYS = {"tokens": "u1", "offsets": "<u8", "ids": "u1", "id_offsets": "<u8"}
# An optional array.
CLUSTERS, CLUSTERS_TYPE = "clusters", "<u8"

# The numbers of the residues are consecutive.
_FIRST, _LAST = VOCABULARY.residues[[0, -1]].astype(np.uint8)

# Start and end of each array in the file, in bytes.
Places: TypeAlias = dict[str, tuple[int, int]]

# Exceptions of HDF5 and `places_of` for a file that is damaged or not a shard.
READING_FAULTS = (OSError, ValueError, KeyError, TypeError, RuntimeError)


class MappedShard(NamedTuple):
    """The arrays of one shard, as read-only views of its memory map.

    Only the first and the last offset are checked when a shard is opened; the others are checked
    when they are used, so that opening does not read the shard.
    """

    path: Path
    tokens: np.ndarray
    offsets: np.ndarray
    ids: np.ndarray
    id_offsets: np.ndarray
    clusters: np.ndarray | None = None
    pages: mmap.mmap | None = None

    def sequence(self, row: int) -> np.ndarray:
        """Returns the residue tokens of a sequence, uint8, as a read-only view."""
        tokens = self._row(self.tokens, self.offsets, row)
        # Unsigned numbers below the first residue wrap around to large ones.
        if (tokens - _FIRST).max(initial=0) > _LAST - _FIRST:
            raise InputDataError(
                f"{self._invalid_tokens()}; see: protlm data verify "
                f"{self.path.parents[1]}; or make the data set again"
            )
        return tokens

    def identifier(self, row: int) -> bytes:
        return self._row(self.ids, self.id_offsets, row).tobytes()

    def lengths(self, rows: np.ndarray | slice) -> np.ndarray:
        self._check_size()
        starts, stops = self.offsets[:-1][rows], self.offsets[1:][rows]
        if np.any(stops < starts) or np.any(stops > len(self.tokens)):
            raise InputDataError(self._invalid_offsets())
        return (stops - starts).astype(np.int64)

    def cluster_hashes(self, rows: np.ndarray | slice) -> np.ndarray:
        """Returns the hashes of the clusters of these sequences, uint64."""
        self._check_size()
        if self.clusters is None:
            raise InputDataError(f"the shard {self.path} has no clusters: make the data set again")
        return self.clusters[rows]

    def check(self) -> None:
        """Checks that offsets never decrease and that all tokens are residues."""
        for offsets in (self.offsets, self.id_offsets):
            if np.any(offsets[1:] < offsets[:-1]):
                raise InputDataError(self._invalid_offsets())
        # Minimum and maximum are fast to compute.
        if self.tokens.size and (self.tokens.min() < _FIRST or self.tokens.max() > _LAST):
            raise InputDataError(self._invalid_tokens())

    def _row(self, content: np.ndarray, offsets: np.ndarray, row: int) -> np.ndarray:
        self._check_size()
        start, stop = int(offsets[row]), int(offsets[row + 1])
        if not start <= stop <= len(content):
            raise InputDataError(self._invalid_offsets())
        return content[start:stop]

    def _check_size(self) -> None:
        """Makes sure that the file was not truncated: reading its pages would end the process."""
        if self.pages is not None and (size := self.pages.size()) < len(self.pages):
            raise InputDataError(
                f"the shard {self.path} was truncated while it was read: it has {size:,} bytes and "
                f"should have {len(self.pages):,}; restore it, or make the data set again"
            )

    def _invalid_tokens(self) -> str:
        return f"the shard {self.path} is damaged (a token is not a residue)"

    def _invalid_offsets(self) -> str:
        return f"the shard {self.path} is not a shard of protlm (the offsets decrease)"


def find_arrays(path: Path, entry: ShardEntry) -> Places:
    """Finds the positions of the arrays of a shard with HDF5, without reading the arrays."""
    check_size(path, entry)
    try:
        return places_of(path, ARRAYS, entry.bytes, optional={CLUSTERS: CLUSTERS_TYPE})
    except READING_FAULTS as error:
        raise InputDataError(f"the shard {path} is not a shard of protlm ({error})") from error


def places_of(
    path: Path, kinds: dict[str, str], size: int, *, optional: dict[str, str] | None = None
) -> Places:
    """Finds the positions of the arrays of a file with HDF5."""
    with h5py.File(path, "r", locking=False) as file:
        # `name in file` would follow a link into another file.
        links = file.id.links
        there = {n: kind for n, kind in (optional or {}).items() if links.exists(n.encode())}
        return {name: _place(file, name, kind, size) for name, kind in {**kinds, **there}.items()}


def map_shard(
    path: Path, entry: ShardEntry, places: Places, *, shuffled: bool = False
) -> MappedShard:
    """Maps a shard into memory."""
    check_size(path, entry)
    try:
        pages, arrays = map_arrays(
            path, {**ARRAYS, CLUSTERS: CLUSTERS_TYPE}, places, shuffled=shuffled
        )
    except (OSError, ValueError) as error:
        raise InputDataError(f"the shard {path} cannot be read: {error}") from error
    shard = MappedShard(path, **arrays, pages=pages)
    if fault := _misfit(shard, entry):
        raise InputDataError(f"the shard {path} is not a shard of protlm ({fault})")
    return shard


def map_arrays(
    path: Path, kinds: dict[str, str], places: Places, *, shuffled: bool
) -> tuple[mmap.mmap, dict[str, np.ndarray]]:
    """Maps a file into memory, read-only, and returns its pages and views of its arrays."""
    with path.open("rb") as file:
        raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if shuffled and hasattr(mmap, "MADV_RANDOM"):
        # The kernel would read 128 KiB for each sequence of a few hundred bytes.
        raw.madvise(mmap.MADV_RANDOM)
    whole = np.frombuffer(raw, np.uint8)
    return raw, {name: whole[a:b].view(kinds[name]) for name, (a, b) in places.items()}


def size_fault(path: Path, entry: ShardEntry | IndexEntry) -> str:
    """Returns why a file cannot match the manifest by its size, or an empty string."""
    what = "shard" if isinstance(entry, ShardEntry) else "cluster index"
    try:
        if not path.is_file():
            return f"the {what} {path} is missing"
        if (size := path.stat().st_size) != entry.bytes:
            return f"the {what} {path} has {size:,} bytes and should have {entry.bytes:,}"
    except OSError as error:
        return f"the {what} {path} cannot be read: {error.strerror}"
    return ""


def check_size(path: Path, entry: ShardEntry | IndexEntry) -> None:
    """Refuses a file that cannot match the manifest by its size."""
    if fault := size_fault(path, entry):
        raise InputDataError(fault)


def _place(file: h5py.File, name: str, kind: str, size: int) -> tuple[int, int]:
    """Returns start and end of an array in the file; rejects links and external storage."""
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"{name} is missing or a link")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{name} is not an array")
    layout = dataset.id.get_create_plist()
    if layout.get_layout() != h5py.h5d.CONTIGUOUS or layout.get_external_count():
        raise ValueError(f"{name} is not stored contiguously in this file")
    type_ours = h5py.h5t.py_create(np.dtype(kind))
    if not dataset.id.get_type().equal(type_ours) or dataset.ndim != 1:
        raise ValueError(f"{name} is {dataset.dtype} of shape {dataset.shape}")
    if dataset.size == 0:
        return 0, 0
    start = dataset.id.get_offset()
    if start is None or start + dataset.nbytes > size:
        raise ValueError(f"{name} is outside the file")
    return start, start + dataset.nbytes


def _misfit(shard: MappedShard, entry: ShardEntry) -> str:
    """Returns how the arrays differ from the manifest, or an empty string."""
    if len(shard.tokens) != entry.residues:
        return f"{len(shard.tokens)} residues instead of {entry.residues}"
    for offsets, content in ((shard.offsets, shard.tokens), (shard.id_offsets, shard.ids)):
        if len(offsets) != entry.sequences + 1 or offsets[0] != 0 or offsets[-1] != len(content):
            return "the offsets do not cover the array"
    if shard.clusters is not None and len(shard.clusters) != entry.sequences:
        return f"{len(shard.clusters)} clusters instead of {entry.sequences}"
    return ""
