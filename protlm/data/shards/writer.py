"""Writing of shards, which are concatenated sequences as arrays, and of cluster indexes."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from protlm.data.shards.cluster_index import ARRAYS as INDEX_ARRAYS
from protlm.data.shards.hdf5_layout import Array, Content, contents
from protlm.data.shards.manifest import IndexEntry, ShardEntry
from protlm.data.shards.mapped_shard import (
    ARRAYS,
    CLUSTERS,
    CLUSTERS_TYPE,
    find_arrays,
    map_shard,
)
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import InputDataError
from protlm.system.paths import complete_file, explain_os_error


@dataclass(frozen=True)
class PackedSequences:
    """Concatenated sequences, in the representation of a shard.

    Args:
        tokens: residues, uint8 [residues].
        lengths: number of residues of each sequence, uint32 [sequences].
        ids: identifiers in UTF-8, uint8 [bytes].
        id_lengths: number of bytes of each identifier, uint32 [sequences].
        clusters: hash of each sequence's cluster, uint64 [sequences], if clusters are stored.
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

    Args:
        directory: the folder of the data set.
        file: name of the shard in that folder, for instance `train/shard-00000.h5`.
        parts: the sequences; their arrays are written without copying.
    """
    offsets = _offsets([part.lengths for part in parts])
    id_offsets = _offsets([part.id_lengths for part in parts])
    arrays = {
        "tokens": [part.tokens for part in parts],
        "offsets": [offsets],
        "ids": [part.ids for part in parts],
        "id_offsets": [id_offsets],
    }
    clusters = [part.clusters for part in parts if part.clusters is not None]
    if clusters and len(clusters) == len(parts):
        arrays[CLUSTERS] = [some.astype(CLUSTERS_TYPE, copy=False) for some in clusters]
    (directory / file).parent.mkdir(parents=True, exist_ok=True)
    kinds = {**ARRAYS, CLUSTERS: CLUSTERS_TYPE}
    size, sha256 = _write(directory / file, kinds, arrays)
    return ShardEntry(file, len(offsets) - 1, int(offsets[-1]), size, sha256)


def write_cluster_index(directory: Path, split: str, shards: Sequence[ShardEntry]) -> IndexEntry:
    """Writes `SPLIT/clusters.h5`; the same shards give the same bytes.

    Clusters are sorted by hash, in about 30 bytes of memory for each sequence of the split, and the
    members of each are in the order of the split.

    Args:
        directory: the folder of the data set.
        split: the name of the split.
        shards: shards of the split, in order; all have clusters.
    """
    file = f"{split}/clusters.h5"
    hashes = np.concatenate([_clusters_of(directory / one.file, one) for one in shards])
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    starts = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1]))
    arrays = {"offsets": np.append(starts, len(order)), "members": order}
    parts = {name: [array.astype(INDEX_ARRAYS[name])] for name, array in arrays.items()}
    try:
        size, sha256 = _write(directory / file, INDEX_ARRAYS, parts)
    except OSError as error:
        raise explain_os_error(error, directory / file) from error
    return IndexEntry(file, len(starts), size, sha256)


def _clusters_of(path: Path, shard: ShardEntry) -> np.ndarray:
    """Returns the hash of the cluster of each sequence of a shard."""
    clusters = map_shard(path, shard, find_arrays(path, shard)).clusters
    if clusters is None:
        raise InputDataError(f"the shard {path} has no clusters: make the data set again")
    return clusters


def _write(
    path: Path, kinds: dict[str, str], arrays: dict[str, list[np.ndarray]]
) -> tuple[int, str]:
    """Writes arrays, each in parts, as a file; returns its size and its SHA-256."""
    content = list(contents({name: _array(kinds[name], some) for name, some in arrays.items()}))
    # Another thread hashes while this one waits for the disk.
    with ThreadPoolExecutor(1) as thread:
        sha256 = thread.submit(_sha256, content)
        with complete_file(path) as temporary, temporary.open("xb") as out:
            out.writelines(content)
    return sum(map(len, content)), sha256.result()


def _array(kind: str, parts: list[np.ndarray]) -> Array:
    pieces = [part.view(np.uint8).data for part in parts]
    return Array(kind, sum(map(len, parts)), pieces)


def _sha256(pieces: list[Content]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _offsets(lengths: list[np.ndarray]) -> np.ndarray:
    """Returns the start of each sequence and the end of the last, uint64 [sequences + 1]."""
    offsets = np.zeros(sum(map(len, lengths)) + 1, "<u8")
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return offsets
