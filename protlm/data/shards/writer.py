"""Writing of shards, which are concatenated sequences as arrays, and of cluster indexes.

They are files of contiguous arrays, whose HDF5 metadata is created in memory.
"""

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import h5py
import numpy as np

from protlm.data.shards.cluster_index import ARRAYS as INDEX_ARRAYS
from protlm.data.shards.manifest import Clusters, IndexEntry, ShardEntry
from protlm.data.shards.mapped_shard import ARRAYS, CLUSTERS, CLUSTERS_TYPE, find_arrays, map_shard
from protlm.data.vocabulary import VOCABULARY
from protlm.system.paths import complete_file, failures_explained

# Readers map the arrays into memory, where aligned access is faster.
_ALIGNMENT = 64

Content: TypeAlias = bytes | memoryview


def _contents(kinds: dict[str, str], arrays: dict[str, list[np.ndarray]]) -> Iterator[Content]:
    """Yields the bytes of a file: HDF5 metadata, arrays, each in parts, and the gaps between."""
    layout = _MetadataFile()
    blocks: list[tuple[int, Sequence[Content]]] = []
    # Format 1.8 is the oldest that needs no chunks here, and the newest without timestamps.
    with h5py.File(
        layout,
        "w",
        libver=("v108", "v108"),
        track_order=False,
        alignment_threshold=1,
        alignment_interval=_ALIGNMENT,
    ) as file:
        for name, parts in arrays.items():
            start = _place(file, name, kinds[name], sum(map(len, parts)))
            if start is not None:
                blocks.append((start, [part.view(np.uint8).data for part in parts]))
    blocks += [(start, [record]) for start, record in layout.records()]
    end = 0
    for start, some in sorted(blocks, key=lambda block: block[0]):
        yield bytes(start - end)
        end = start
        for content in some:
            yield content
            end += len(content)
    yield bytes(layout.size - end)


@dataclass(frozen=True)
class PackedSequences:
    """Concatenated sequences, in the representation of a shard.

    Residues and identifiers, in UTF-8, are uint8; lengths, of residues and of bytes, uint32; the
    hashes of clusters, if they are stored, uint64.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    ids: np.ndarray
    id_lengths: np.ndarray
    clusters: np.ndarray | None = None

    @classmethod
    def pack(
        cls,
        identifiers: Sequence[str],
        sequences: Sequence[bytes],
        clusters: np.ndarray | None = None,
    ) -> Self:
        """Encodes sequences of residue letters in ASCII together."""
        names = [identifier.encode() for identifier in identifiers]
        return cls(
            tokens=VOCABULARY.encode(b"".join(sequences)),
            lengths=np.fromiter(map(len, sequences), np.uint32, len(sequences)),
            ids=np.frombuffer(b"".join(names), np.uint8),
            id_lengths=np.fromiter(map(len, names), np.uint32, len(names)),
            clusters=clusters,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def keep(self, is_kept: np.ndarray) -> "PackedSequences":
        """Keeps only the sequences where `is_kept`, bool [sequences], is true."""
        return PackedSequences(
            self.tokens[np.repeat(is_kept, self.lengths)],
            self.lengths[is_kept],
            self.ids[np.repeat(is_kept, self.id_lengths)],
            self.id_lengths[is_kept],
            None if self.clusters is None else self.clusters[is_kept],
        )


def write_shard(directory: Path, file: str, parts: Sequence[PackedSequences]) -> ShardEntry:
    """Writes sequences as one shard; the same sequences give the same bytes.

    HDF5 does not write to the disk, because on a full disk it leaves a broken file and crashes at
    exit. The shard has clusters if all parts have them.
    """
    offsets = _offsets([part.lengths for part in parts])
    arrays = {
        "tokens": [part.tokens for part in parts],
        "offsets": [offsets],
        "ids": [part.ids for part in parts],
        "id_offsets": [_offsets([part.id_lengths for part in parts])],
    }
    clusters = [part.clusters for part in parts if part.clusters is not None]
    if clusters and len(clusters) == len(parts):
        arrays[CLUSTERS] = [some.astype(CLUSTERS_TYPE, copy=False) for some in clusters]
    (directory / file).parent.mkdir(parents=True, exist_ok=True)
    size, sha256 = _write(directory / file, {**ARRAYS, CLUSTERS: CLUSTERS_TYPE}, arrays)
    return ShardEntry(file, len(offsets) - 1, int(offsets[-1]), size, sha256)


def write_clusters(
    directory: Path, splits: Mapping[str, Sequence[ShardEntry]], table: tuple[str, str]
) -> Clusters:
    """Writes the cluster index of each split, whose shards are complete; `table` is as stored."""
    return Clusters(
        *table, {split: write_cluster_index(directory, split, splits[split]) for split in splits}
    )


def write_cluster_index(directory: Path, split: str, shards: Sequence[ShardEntry]) -> IndexEntry:
    """Writes `SPLIT/clusters.h5`; the same shards give the same bytes.

    Clusters are sorted by hash, and the members of each are in the order of the split. This takes
    24 bytes of memory for each sequence of the split, and 24 for each cluster.
    """
    file = f"{split}/clusters.h5"
    hashes = np.concatenate(
        [
            map_shard(path, one, find_arrays(path, one)).cluster_hashes(slice(None))
            for path, one in ((directory / one.file, one) for one in shards)
        ]
    )
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    starts = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1]))
    arrays = {"offsets": np.append(starts, len(order)), "members": order}
    parts = {name: [array.astype(INDEX_ARRAYS[name])] for name, array in arrays.items()}
    with failures_explained(directory / file):
        size, sha256 = _write(directory / file, INDEX_ARRAYS, parts)
    return IndexEntry(file, len(starts), size, sha256)


def _write(
    path: Path, kinds: dict[str, str], arrays: dict[str, list[np.ndarray]]
) -> tuple[int, str]:
    """Writes arrays, each in parts, as a file; returns its size and its SHA-256."""
    content = list(_contents(kinds, arrays))
    # Another thread hashes while this one waits for the disk.
    with ThreadPoolExecutor(1) as thread:
        sha256 = thread.submit(_sha256, content)
        with complete_file(path) as temporary, temporary.open("xb") as out:
            out.writelines(content)
    return sum(map(len, content)), sha256.result()


def _sha256(blocks: list[Content]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def _offsets(lengths: list[np.ndarray]) -> np.ndarray:
    """Returns the start of each sequence and the end of the last, uint64 [sequences + 1]."""
    offsets = np.zeros(sum(map(len, lengths)) + 1, "<u8")
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return offsets


def _place(file: h5py.File, name: str, kind: str, size: int) -> int | None:
    """Allocates an array in the file, and returns its offset; None if the array is empty."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    stored = h5py.h5t.py_create(np.dtype(kind))
    space = h5py.h5s.create_simple((size,))
    return h5py.h5d.create(file.id, name.encode(), stored, space, properties).get_offset()


class _MetadataFile(io.RawIOBase):
    """An in-memory file that stores the metadata which HDF5 writes, and the file size."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._position = 0
        self.size = 0

    def records(self) -> list[tuple[int, bytes]]:
        """Returns the written bytes as contiguous runs with their offsets."""
        runs: list[tuple[int, bytearray]] = []
        for position, value in sorted(self._bytes.items()):
            if not runs or position != runs[-1][0] + len(runs[-1][1]):
                runs.append((position, bytearray()))
            runs[-1][1].append(value)
        return [(start, bytes(run)) for start, run in runs]

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def write(self, content: Any, /) -> int:
        record = bytes(content)
        self._bytes.update(enumerate(record, start=self._position))
        self._position += len(record)
        self.size = max(self.size, self._position)
        return len(record)

    def truncate(self, size: int | None = None, /) -> int:
        self.size = self._position if size is None else size
        return self.size
