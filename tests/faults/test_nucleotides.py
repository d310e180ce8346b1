"""A file of DNA or RNA is rejected; a few such records among proteins are noted."""

import numpy as np
import pytest

RNG = np.random.default_rng(0)


def fasta(letters: str, number: int, first: int = 0) -> bytes:
    sequences = ("".join(RNG.choice(list(letters), 60)) for _ in range(number))
    return b"".join(f">r{first + i}\n{s}\n".encode() for i, s in enumerate(sequences))


@pytest.mark.parametrize("letters", ["ACGT", "ACGU", "acgtn"])
def test_a_file_of_nucleotides_is_refused(refuse_bytes, prepare_bytes, letters):
    content = fasta(letters, 1_100)
    message = refuse_bytes(content)
    assert "DNA or RNA" in message and "--allow-nucleotides" in message
    noted = prepare_bytes(content, allow_nucleotides=True)["counts"]["noted"]
    assert noted["record of the letters ACGTUN alone"] == 1_100


def test_nucleotides_among_proteins_are_reported(prepare_bytes):
    content = fasta("ACDEFGHIKLMNPQRSTVWY", 100) + fasta("ACGT", 7, first=100)
    counts = prepare_bytes(content)["counts"]
    assert counts["noted"] == {"record of the letters ACGTUN alone": 7}
    assert counts["rejected"] == {}
