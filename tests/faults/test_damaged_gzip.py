"""Gzip data that are truncated, or of which a bit is flipped, never pass."""

import numpy as np

from protlm.paths import sample_dir

CONTENT = (sample_dir() / "uniprot_tiny.fasta.gz").read_bytes()


def test_f07_truncated_data_never_pass(refuse_bytes):
    for size in np.random.default_rng(0).integers(2, len(CONTENT), 20):
        assert "truncated or damaged near byte" in refuse_bytes(CONTENT[:size])


def test_f08_a_flipped_bit_never_passes(refuse_bytes):
    # A time and a name stand before the data, which no checksum covers.
    start = CONTENT.index(b"\0", 10) + 1 if CONTENT[3] & 8 else 10
    for offset in np.random.default_rng(0).integers(start, len(CONTENT) - 9, 50):
        flipped = bytearray(CONTENT)
        flipped[offset] ^= 1 << (offset % 8)
        assert "proteins.fasta" in refuse_bytes(bytes(flipped))
