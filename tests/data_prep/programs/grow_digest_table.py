"""Adds digests to a table on disk: TABLE BATCHES; prints its size and the growth of the memory.

The growth, in bytes, is that of the peak after the second of the batches of 150,000.
"""

import re
import sys
from pathlib import Path

import numpy as np

from protlm.data_prep.duplicates import DigestSet  # pyright: ignore[reportMissingImports]


def peak_bytes() -> int:
    """Returns the peak of the resident memory."""
    (peak,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(peak) * 1024


if __name__ == "__main__":
    known = DigestSet(Path(sys.argv[1]), memory_slots=1 << 14)
    rng = np.random.default_rng(0)
    before = 0
    for number in range(int(sys.argv[2])):
        digests = rng.integers(0, 2**64, (150_000, 2), np.uint64)
        # Sorted digests traverse the table in order, which is fast; unsorted ones touch all of it.
        known.add(digests[np.argsort(digests[:, 0])][:-10_000])
        known.add(digests[:10_000] ^ np.uint64(1))
        if number == 1:
            before = peak_bytes()
    print(known._size, peak_bytes() - before)
