"""Preparing takes no more memory for a larger input."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# Writes proteins of 300 random residues to standard output.
GENERATE = """
import sys
import numpy as np
letters = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", np.uint8)
rng = np.random.default_rng(0)
for start in range(0, int(sys.argv[1]), 10_000):
    residues = rng.choice(letters, (10_000, 300)).tobytes()
    for i in range(10_000):
        record = b">p%d\\n%s\\n" % (start + i, residues[300 * i : 300 * (i + 1)])
        sys.stdout.buffer.write(record)
"""

PREPARE = """
import re, sys
from pathlib import Path
from functools import partial
from protlm.data_prep import segments
from protlm.data_prep.prepare import PrepareOptions, prepare
from protlm.data_prep.split import HashSplit

segments.DigestSet = partial(segments.DigestSet, memory_slots=1 << 16)
options = PrepareOptions(shard_residues=10_000_000, workers=int(sys.argv[2]), deduplicate=True)
prepare([Path("-")], Path(sys.argv[1]), split_rule=HashSplit(0.01, 0.01), options=options)
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def peak(out: Path, records: int, workers: int) -> int:
    """The peak of the resident memory of the process that reads and writes, in bytes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    generate = [sys.executable, "-c", GENERATE, str(records)]
    with subprocess.Popen(generate, stdout=subprocess.PIPE) as source:
        done = subprocess.run(
            [sys.executable, "-c", PREPARE, out, str(workers)],
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
