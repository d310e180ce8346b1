"""250 million sequences: what the first batch, and one far on, cost in memory and in pages.

The shards are real HDF5 files full of holes: nearly all of their sequences have no residue.
"""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from protlm.data.batching.order import EpochOrder, hashed
from protlm.data.shards import cluster_index
from protlm.data.shards.manifest import Clusters, Counts, IndexEntry, Manifest, ShardEntry
from protlm.data.shards.mapped_shard import ARRAYS
from tests.fixtures.commands import run_python

PROGRAM = Path(__file__).parent / "programs" / "first_batches.py"
NUM_SHARDS, PER_SHARD, RESIDUES = 440, 568_182, 250_000_000
# Clusters of four, and the places in the run that are looked at: pass and first position.
MEMBERS = 4
NUM_CLUSTERS = NUM_SHARDS * PER_SHARD // MEMBERS
WINDOW, PLACES = 16_384, ((0, 0), (3, 3_000 * 16_384))


def make_holes(file: h5py.File, sizes: dict[str, int], kinds: dict[str, str]) -> None:
    """Gives arrays their room in a file, and writes none of it."""
    hole = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    hole.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    hole.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    for name, size in sizes.items():
        kind = h5py.h5t.py_create(np.dtype(kinds[name]))
        space = h5py.h5s.create_simple((size,))
        h5py.h5d.create(file.id, name.encode(), kind, space, hole)


def hollow_shard(path: Path) -> ShardEntry:
    """A shard of which only HDF5's records and the ends of the offsets are on the disk."""
    sizes = {
        "tokens": RESIDUES,
        "offsets": PER_SHARD + 1,
        "ids": 10 * PER_SHARD,
        "id_offsets": PER_SHARD + 1,
    }
    with h5py.File(path, "w", libver=("v108", "v108")) as file:
        make_holes(file, sizes, ARRAYS)
        file["offsets"][-1] = RESIDUES
        file["id_offsets"][-1] = 10 * PER_SHARD
    name = f"train/{path.name}"
    return ShardEntry(name, PER_SHARD, RESIDUES, path.stat().st_size, "0" * 64)


def hollow_index(path: Path) -> IndexEntry:
    """An index of which only those clusters are on the disk that will be drawn."""
    num_members = NUM_CLUSTERS * MEMBERS
    with h5py.File(path, "w", libver=("v108", "v108")) as file:
        sizes = {"offsets": NUM_CLUSTERS + 1, "members": num_members}
        make_holes(file, sizes, cluster_index.ARRAYS)
        start_of = {name: file[name].id.get_offset() for name in sizes}
    offsets, members = (
        np.memmap(path, "<u8", "r+", start_of[name], (sizes[name],)) for name in sizes
    )
    offsets[-1] = num_members
    rng = np.random.default_rng(0)
    for repeat, first in PLACES:
        positions = np.arange(first, first + WINDOW)
        clusters = EpochOrder(NUM_CLUSTERS, seed=0, epoch=repeat)[positions]
        offsets[clusters], offsets[clusters + 1] = MEMBERS * clusters, MEMBERS * (clusters + 1)
        starts = (hashed(clusters, seed=0) % np.uint64(MEMBERS)).astype(np.int64)
        drawn = MEMBERS * clusters + (starts + repeat) % MEMBERS
        # Anywhere in the shards; the first sequence represents those that were not written.
        members[drawn] = rng.integers(1, num_members, WINDOW)
    return IndexEntry("train/clusters.h5", NUM_CLUSTERS, path.stat().st_size, "0" * 64)


@pytest.fixture(scope="module")
def enormous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 250,000,080 sequences and 110 GB, nearly all of it holes."""
    directory = tmp_path_factory.mktemp("data")
    (directory / "train").mkdir()
    paths = [directory / "train" / f"shard-{number:05d}.h5" for number in range(NUM_SHARDS)]
    shards = tuple(hollow_shard(path) for path in paths)
    index = hollow_index(directory / "train" / "clusters.h5")
    clusters = Clusters("cluster.tsv", "0" * 64, {"train": index})
    Manifest({"train": shards}, (), Counts(NUM_SHARDS * PER_SHARD), {}, clusters).write(directory)
    assert sum(path.stat().st_size for path in paths) > 1e11
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sequences", "concatenated"])
@pytest.mark.parametrize("sampling", ["uniform", "cluster"])
def test_a_batch_of_250_million_sequences_takes_little(
    enormous: Path, mode: str, sampling: str
) -> None:
    found = json.loads(run_python(PROGRAM, enormous, mode, sampling, OMP_NUM_THREADS="1").stdout)
    assert found["sequences"] == 250_000_080
    assert found["clusters"] == (NUM_CLUSTERS if sampling == "cluster" else None)
    assert found["forecast"].endswith("of the positions of a batch are padding")
    assert found["rows"] > 0
    assert found["mib"] < 500, found
    # The list of all lengths would be 2,000 MB; a window's are on 16,384 pages at most, and its
    # clusters and their members on twice as many.
    assert found["more_mib"] < 200 * (1 if sampling == "uniform" else 3), found
    assert found["faults"] < 12 * 16_384 * (1 if sampling == "uniform" else 3), found
