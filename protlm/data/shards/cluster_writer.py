"""Writes the cluster index of a split from the `clusters` arrays of its shards."""

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from protlm.data.shards.cluster_index import ARRAYS
from protlm.data.shards.hdf5_layout import Array, Content, contents
from protlm.data.shards.manifest import IndexEntry, ShardEntry
from protlm.data.shards.mapped_shard import Places, find_arrays, map_shard
from protlm.system.errors import InputDataError
from protlm.system.paths import complete_file, explain_os_error, sha256_of

# Members sorted at a time, unless a cluster has more; each takes about 50 bytes of memory.
_MEMBERS = 1 << 22
_BIN_BITS = 16
_CHUNK = 1 << 20


def write_cluster_index(directory: Path, split: str, shards: Sequence[ShardEntry]) -> IndexEntry:
    """Writes `SPLIT/clusters.h5`; the same shards give the same bytes.

    Clusters are sorted by hash, and the members of each are in the order of the split.
    The shards' arrays are read several times, a range of hashes each time, so that memory does not
    depend on the number of sequences.

    Args:
        directory: the folder of the data set.
        split: the name of the split.
        shards: shards of the split, in order; all have clusters.
    """
    file = f"{split}/clusters.h5"
    path = directory / file
    try:
        with (
            tempfile.TemporaryFile(dir=path.parent) as offsets,
            tempfile.TemporaryFile(dir=path.parent) as members,
        ):
            num_clusters, num_members = _group(directory, shards, offsets, members)
            arrays = {
                "offsets": Array(ARRAYS["offsets"], num_clusters + 1, _pieces(offsets)),
                "members": Array(ARRAYS["members"], num_members, _pieces(members)),
            }
            with complete_file(path) as temporary:
                with temporary.open("xb") as out:
                    out.writelines(contents(arrays))
                size, sha256 = temporary.stat().st_size, sha256_of(temporary)
    except OSError as error:
        raise explain_os_error(error, path) from error
    return IndexEntry(file, num_clusters, size, sha256)


def _group(
    directory: Path, shards: Sequence[ShardEntry], offsets: BinaryIO, members: BinaryIO
) -> tuple[int, int]:
    """Writes both arrays of the index, and returns the numbers of clusters and members."""
    places = [find_arrays(directory / shard.file, shard) for shard in shards]
    num_clusters = num_members = 0
    offsets.write(np.zeros(1, ARRAYS["offsets"]).tobytes())
    for first, last in _ranges(directory, shards, places):
        hashes, numbers = _members_between(directory, shards, places, (first, last))
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        ends = np.append(np.flatnonzero(hashes[1:] != hashes[:-1]) + 1, len(hashes)) + num_members
        offsets.write(ends.astype(ARRAYS["offsets"]).tobytes())
        members.write(numbers[order].astype(ARRAYS["members"]).tobytes())
        num_clusters += len(ends)
        num_members += len(hashes)
    return num_clusters, num_members


def _ranges(
    directory: Path, shards: Sequence[ShardEntry], places: Sequence[Places]
) -> Iterator[tuple[int, int]]:
    """Yields non-empty ranges of hashes, ends included, of about `_MEMBERS` members each."""
    counts = np.zeros(1 << _BIN_BITS, np.int64)
    shift = 64 - _BIN_BITS
    for hashes in _hashes(directory, shards, places):
        bins = (hashes >> np.uint64(shift)).astype(np.int64)
        counts += np.bincount(bins, minlength=len(counts))
    first, size = 0, 0
    for number, count in enumerate(counts.tolist()):
        if size and size + count > _MEMBERS:
            yield first << shift, (number << shift) - 1
            first, size = number, 0
        size += count
    if size:
        yield first << shift, (1 << 64) - 1


def _members_between(
    directory: Path,
    shards: Sequence[ShardEntry],
    places: Sequence[Places],
    ends: tuple[int, int],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns hashes and numbers of the sequences whose cluster is in a range, both uint64.

    They are in the order of the split.
    """
    first, last = (np.uint64(end) for end in ends)
    hashes, numbers, before = [], [], 0
    for some in _hashes(directory, shards, places):
        here = np.flatnonzero((some >= first) & (some <= last))
        hashes.append(some[here])
        numbers.append((here + before).astype(np.uint64))
        before += len(some)
    return np.concatenate(hashes), np.concatenate(numbers)


def _hashes(
    directory: Path, shards: Sequence[ShardEntry], places: Sequence[Places]
) -> Iterator[np.ndarray]:
    """Yields the clusters of each shard, and maps one shard at a time."""
    for shard, where in zip(shards, places, strict=True):
        path = directory / shard.file
        clusters = map_shard(path, shard, where).clusters
        if clusters is None:
            raise InputDataError(f"the shard {path} has no clusters: make the data set again")
        yield clusters


def _pieces(file: BinaryIO) -> Iterator[Content]:
    file.seek(0)
    return iter(partial(file.read, _CHUNK), b"")
