"""Preparing takes no more memory for a larger input."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = Path(__file__).parent / "programs"


def peak(out: Path, records: int, workers: int) -> int:
    """The peak of the resident memory of the process that reads and writes, in bytes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    generate = [sys.executable, PROGRAMS / "write_proteins.py", str(records)]
    with subprocess.Popen(generate, stdout=subprocess.PIPE) as source:
        done = subprocess.run(
            [sys.executable, PROGRAMS / "prepare_standard_input.py", out, str(workers)],
            stdin=source.stdout,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    assert re.search(rf"read +{records:,}", done.stderr)
    return int(done.stdout) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_memory_does_not_grow_with_the_input(tmp_path, workers):
    small, large = (peak(tmp_path / f"{n}", n, workers) for n in (100_000, 800_000))
    assert large < small + (64 << 20)
    assert large < 250 << 20
