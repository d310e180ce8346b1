"""Adds digests to a table until it exceeds 4 MiB: TABLE; prints the error number and the size."""

import sys
from pathlib import Path

import numpy as np

from protlm.data_prep.duplicates import DigestSet  # pyright: ignore[reportMissingImports]
from tests.faults.programs.file_size import limit_file_size

if __name__ == "__main__":
    limit_file_size(1 << 22)
    known = DigestSet(Path(sys.argv[1]), memory_slots=1 << 16)
    rng = np.random.default_rng(0)
    try:
        for _ in range(100):
            known.add(rng.integers(0, 2**64, (10_000, 2), np.uint64))
    except OSError as error:
        print(error.errno, len(known))
