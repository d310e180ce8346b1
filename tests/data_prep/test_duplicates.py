"""The set of digests behaves like a set, in memory and on disk."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from protlm.data_prep.duplicates import DigestSet

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = Path(__file__).parent / "programs" / "grow_digest_table.py"


def digests(rng, size, *, kinds):
    """Digests of which many are equal and many more have the same slot."""
    picked = rng.integers(0, kinds, size).astype(np.uint64)
    high = (picked % np.uint64(97)) << np.uint64(57)
    return np.stack([high, picked], axis=1)


@pytest.mark.parametrize("memory_slots", [2, 1 << 8, 1 << 20])
def test_it_agrees_with_a_set(tmp_path, memory_slots):
    rng = np.random.default_rng(memory_slots)
    known, truth = DigestSet(tmp_path / "table", memory_slots=memory_slots), set()
    for _ in range(30):
        some = digests(rng, int(rng.integers(0, 700)), kinds=6_000)
        expected = []
        for digest in map(tuple, some.tolist()):
            expected.append(digest not in truth)
            truth.add(digest)
        assert known.add(some).tolist() == expected
    assert len(known) == len(truth)
    assert not known.add(np.array(sorted(truth), np.uint64)).any()
    assert (tmp_path / "table").exists() == (memory_slots < 1 << 20)


def test_slots_wrap_around_at_the_end(tmp_path):
    known = DigestSet(tmp_path / "table", memory_slots=2)
    last = np.full((1_000, 2), 2**64 - 1, np.uint64)
    last[:, 1] = np.arange(1_000)
    assert known.add(last).all()
    assert not known.add(last).any()


def test_the_digest_of_zeros_is_an_ordinary_digest(tmp_path):
    known = DigestSet(tmp_path / "table")
    zeros = np.zeros((2, 2), np.uint64)
    assert known.add(zeros).tolist() == [True, False]
    assert known.add(zeros).tolist() == [False, False]


@pytest.mark.slow
def test_a_table_on_disk_takes_no_memory_as_it_grows(tmp_path):
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path / "table", "100"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    size, grown = map(int, done.stdout.split())
    assert size == 15_000_000
    assert (tmp_path / "table").stat().st_size > 500 << 20
    assert grown < 200 << 20
