"""Writes a FASTA file of any size with the lengths and residues of real proteins.

python -m benchmarks.synthetic_fasta OUT.fasta.gz --records 10000000 [--source REAL.fasta.gz]

The proteins of the source are joined in a circle. Each sequence is a stretch of that circle with a
random start and the length of a random protein of the source, up to a tenth longer or shorter. So
lengths, residues and their order are real, and equal sequences are rare.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.progress import track

from protlm.data.records import Tally, read_records
from protlm.system.errors import exit_with_message
from protlm.system.paths import check_output, complete_file, sample_dir

SAMPLE = sample_dir() / "uniprot_sample.fasta.gz"
_RECORDS_OF_A_CHUNK = 20_000
_LINE = 60
_SPREAD = 0.1


class Proteins:
    """Draws random proteins with the lengths and residues of real proteins.

    Args:
        source: a sequence file.
        seed: the seed of all random choices.
    """

    def __init__(self, source: Path, *, seed: int = 0) -> None:
        sequences = [record.sequence for record in read_records(source, Tally())]
        self._lengths = np.array([len(sequence) for sequence in sequences])
        joined = "".join(sequences)
        # A stretch that starts near the end continues at the beginning.
        longest = round((1 + _SPREAD) * self._lengths.max()) + 1
        self._starts = len(joined)
        self._residues = (joined + joined * (longest // len(joined) + 1)).encode()
        self._rng = np.random.default_rng(seed)

    def draw(self, count: int) -> list[bytes]:
        """Returns the residues of `count` proteins, as letters."""
        starts = self._rng.integers(self._starts, size=count)
        stretch = self._rng.uniform(1 - _SPREAD, 1 + _SPREAD, size=count)
        lengths = np.maximum(1, np.rint(self._rng.choice(self._lengths, count) * stretch))
        ends = starts + lengths.astype(np.int64)
        return [
            self._residues[start:end]
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]


def fasta(proteins: Proteins, num_records: int) -> Iterator[bytes]:
    """Yields the FASTA text of `num_records` proteins in chunks, 60 residues to a line."""
    for first in range(0, num_records, _RECORDS_OF_A_CHUNK):
        drawn = proteins.draw(min(_RECORDS_OF_A_CHUNK, num_records - first))
        yield b"".join(_record(first + i, residues) for i, residues in enumerate(drawn))


def _record(number: int, residues: bytes) -> bytes:
    lines = b"\n".join(residues[i : i + _LINE] for i in range(0, len(residues), _LINE))
    name = b"A0A%09d" % number
    header = b">tr|%b|%b_9ZZZZ Synthetic protein OS=unknown OX=32644 PE=4 SV=1" % (name, name)
    return header + b"\n" + lines + b"\n"


def write(path: Path, num_records: int, *, source: Path = SAMPLE, seed: int = 0) -> None:
    """Writes a gzip file of `num_records` records.

    Raises:
        InputDataError: the source cannot be read.
        OutputError: the file exists or cannot be written.
    """
    from isal import igzip

    chunks = fasta(Proteins(source, seed=seed), num_records)
    total = -(-num_records // _RECORDS_OF_A_CHUNK)
    check_output(path)
    with complete_file(path) as temporary, igzip.IGzipFile(temporary, "wb") as file:
        for chunk in track(chunks, description=path.name, total=total):
            file.write(chunk)


def main() -> None:
    """Reads the command line and writes the file."""
    parser = argparse.ArgumentParser(description="Write synthetic proteins with real statistics.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--source", type=Path, default=SAMPLE)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.path, arguments.records, source=arguments.source, seed=arguments.seed)


if __name__ == "__main__":
    exit_with_message(main)
