"""250 million sequences: what the first batch, and one far on, cost in memory and in pages.

The shards are real HDF5 files full of holes: nearly all of their sequences have no residue.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from protlm.data.manifest import Counts, Manifest, ShardEntry
from protlm.data.shard_map import ARRAYS

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_SHARDS, PER_SHARD, RESIDUES = 440, 568_182, 250_000_000

FIRST_BATCHES = """
import json, re, resource, sys
from pathlib import Path
from protlm.data.batching import BatchStream, Progress
from protlm.data.buckets import LengthBuckets
from protlm.data.concatenation import Concatenation
from protlm.data.dataset import SequenceDataset
from protlm.data.forecast import forecast
from protlm.data.masking import MaskingRule
from protlm.data.mixture import Mixture
from protlm.data.shards import open_split

def used():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
    return {"faults": usage.ru_minflt + usage.ru_majflt, "mib": int(peak) / 1024}

rules = {"sequences": LengthBuckets, "concatenated": Concatenation}
rule = rules[sys.argv[2]](131_072, 1_024)
before = used()
data = Mixture([open_split(Path(sys.argv[1]), "train", verify="sizes", shuffled=True)])
order = data.order(seed=0)
told = forecast(data.lengths_of, order, rule)
dataset = SequenceDataset(data, objective="masked", masking=MaskingRule(), seed=0)
for start in (Progress(), Progress(3, 9_000 * rule.window_size)):
    stream = BatchStream(data.lengths_of, order, rule, start=start, num_batches=10**9)
    batch = dataset[next(iter(stream))]
after = used()
print(json.dumps({
    "sequences": len(data),
    "is_exact": told.is_exact,
    "rows": len(batch.samples_B),
    "mib": after["mib"],
    "more_mib": after["mib"] - before["mib"],
    "faults": after["faults"] - before["faults"],
}))
"""


def hollow_shard(path: Path) -> ShardEntry:
    """A shard of which only HDF5's records and the ends of the offsets are on the disk."""
    hole = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    hole.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    hole.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    sizes = {
        "tokens": RESIDUES,
        "offsets": PER_SHARD + 1,
        "ids": 10 * PER_SHARD,
        "id_offsets": PER_SHARD + 1,
    }
    with h5py.File(path, "w", libver=("v108", "v108")) as file:
        for name, size in sizes.items():
            kind = h5py.h5t.py_create(np.dtype(ARRAYS[name]))
            space = h5py.h5s.create_simple((size,))
            h5py.h5d.create(file.id, name.encode(), kind, space, hole)
        file["offsets"][-1] = RESIDUES
        file["id_offsets"][-1] = 10 * PER_SHARD
    name = f"train/{path.name}"
    return ShardEntry(name, PER_SHARD, RESIDUES, path.stat().st_size, "0" * 64)


@pytest.fixture(scope="module")
def enormous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 250,000,080 sequences and 110 GB, nearly all of it holes."""
    directory = tmp_path_factory.mktemp("data")
    (directory / "train").mkdir()
    paths = [directory / "train" / f"shard-{number:05d}.h5" for number in range(NUM_SHARDS)]
    shards = tuple(hollow_shard(path) for path in paths)
    Manifest({"train": shards}, (), Counts(NUM_SHARDS * PER_SHARD), {}).write(directory)
    assert sum(path.stat().st_size for path in paths) > 1e11
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sequences", "concatenated"])
def test_a_batch_of_250_million_sequences_takes_little(enormous: Path, mode: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_BATCHES, enormous, mode],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sequences"] == 250_000_080
    assert not found["is_exact"]
    assert found["rows"] > 0
    assert found["mib"] < 500, found
    # The list of all lengths would be 2,000 MB; a window's are on 16,384 pages at most.
    assert found["more_mib"] < 200, found
    assert found["faults"] < 12 * 16_384, found
