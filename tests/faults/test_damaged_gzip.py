"""Truncated gzip data, and data with a flipped bit, are always rejected."""

import numpy as np

from protlm.system.paths import sample_dir

CONTENT = (sample_dir() / "uniprot_tiny.fasta.gz").read_bytes()


def test_truncated_data_are_rejected(refuse_bytes):
    for size in np.random.default_rng(0).integers(2, len(CONTENT), 20):
        assert "truncated or damaged near byte" in refuse_bytes(CONTENT[:size])


def test_a_flipped_bit_is_rejected(refuse_bytes):
    # A time and a name precede the data; no checksum covers them.
    start = CONTENT.index(b"\0", 10) + 1 if CONTENT[3] & 8 else 10
    for offset in np.random.default_rng(0).integers(start, len(CONTENT) - 9, 50):
        flipped = bytearray(CONTENT)
        flipped[offset] ^= 1 << (offset % 8)
        assert "proteins.fasta" in refuse_bytes(bytes(flipped))
