"""Writes proteins of 300 random residues to standard output: NUMBER, a multiple of 10,000."""

import sys

import numpy as np

if __name__ == "__main__":
    letters = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", np.uint8)
    rng = np.random.default_rng(0)
    for start in range(0, int(sys.argv[1]), 10_000):
        residues = rng.choice(letters, (10_000, 300)).tobytes()
        for i in range(10_000):
            record = b">p%d\n%s\n" % (start + i, residues[300 * i : 300 * (i + 1)])
            sys.stdout.buffer.write(record)
