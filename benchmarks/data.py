"""Measures preparing, reading and feeding protein sequences beside Biopython.

make bench-data, or: python -m benchmarks.data [--fasta FILE.fasta.gz] [--quick]

The contenders of a comparison read the same files and take turns. Preparing includes everything:
the file is unpacked, checked, hashed, split, encoded, written and synced. For millions of records,
`python -m benchmarks.synthetic_fasta` writes the file and `--only preparing` measures it.
"""

import argparse
import contextlib
import gzip
import io
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from Bio import SeqIO, SwissProt
from Bio.SeqIO.FastaIO import SimpleFastaParser

from benchmarks import data_inputs, synthetic_fasta
from benchmarks.harness import (
    QUICK,
    Comparison,
    Pace,
    Run,
    median_table,
    options,
    report,
    speed_table,
    take_turns,
)
from protlm.build import build_data
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.data.records import Tally, read_records
from protlm.data.shards.data_set import open_split
from protlm.data_prep import prepare, split
from protlm.system.errors import exit_with_message
from protlm.training.run_plan import RunPlan

PEER, OURS = "Biopython", "protlm"
THOROUGH = Pace(seconds=60.0, fewest=5, most=5)
PARTS = ("preparing", "reading", "feeding")
# Sequences of a turn, and batches of a turn of the loader.
_SEQUENCES, _BATCHES = 20_000, 100


def _timed(work: Callable[[], int | None]) -> Run:
    """Returns a run that measures the seconds of `work`, per unit if it returns their number."""

    def run() -> float:
        start = time.perf_counter()
        units = work()
        return (time.perf_counter() - start) / (units or 1)

    return run


def _parsed(parse: Callable[..., Iterable[object]], path: Path, mode: str) -> Run:
    """Returns a run in which a parser of Biopython reads a file."""

    def work() -> None:
        with gzip.open(path, mode) as file:
            for _ in parse(file):
                pass

    return _timed(work)


def preparing(fasta: Path, folder: Path, pace: Pace) -> Comparison:
    """Compares preparing a FASTA file by one and two processes with iterating over it."""
    contenders = {PEER: _parsed(SimpleFastaParser, fasta, "rt")}
    contenders |= {
        name: _timed(partial(prepare_anew, fasta, folder / name, workers))
        for workers, name in ((1, "1 worker"), (2, "2 workers"))
    }
    return take_turns("FASTA to shards", contenders, pace)


def prepare_anew(fasta: Path, out: Path, workers: int = 1) -> None:
    """Prepares a data set in the place of an earlier one."""
    shutil.rmtree(out, ignore_errors=True)
    with contextlib.redirect_stderr(io.StringIO()):
        options = prepare.PrepareOptions(workers=workers)
        prepare.prepare([fasta], out, split_rule=split.HashSplit(0.01, 0.01), options=options)


def reading(folder: Path, num_bytes: int, pace: Pace) -> list[Comparison]:
    """Compares reading records of a flat file and of an XML file with the parsers of Biopython."""
    flat, xml = folder / "entries.dat.gz", folder / "entries.xml.gz"
    data_inputs.write_flat_file(flat, num_bytes)
    data_inputs.write_xml(xml, num_bytes)
    parse_xml = partial(SeqIO.parse, format="uniprot-xml")
    peers = _parsed(SwissProt.parse, flat, "rt"), _parsed(parse_xml, xml, "rb")

    def iterate(path: Path) -> None:
        for _ in read_records(path, Tally()):
            pass

    return [
        take_turns(work, {PEER: peer, OURS: _timed(partial(iterate, path))}, pace)
        for work, peer, path in zip(("flat file", "XML"), peers, (flat, xml), strict=True)
    ]


def feeding(fasta: Path, data: Path, pace: Pace) -> Comparison:
    """Compares reading sequences in random order with an index of Biopython.

    The costs are seconds per residue. The loader also masks and pads, in one worker process.
    """
    plain = data / "sequences.fasta"
    with gzip.open(fasta) as source, plain.open("wb") as target:
        shutil.copyfileobj(source, target)
    index, generator = SeqIO.index(str(plain), "fasta"), np.random.default_rng(0)
    keys, split = list(index), open_split(data, "train", verify="sizes", shuffled=True)
    times = 10 if pace is QUICK else 1

    def by_index() -> int:
        drawn = generator.integers(len(keys), size=_SEQUENCES // times).tolist()
        records: list[Any] = [index[keys[place]] for place in drawn]
        return sum(len(record.seq) for record in records)

    def from_shards() -> int:
        drawn = generator.integers(len(split), size=_SEQUENCES // times).tolist()
        return sum(len(split[place].copy()) for place in drawn)

    overrides = (f"data.dir={data}", "data.num_workers=1", "data.verify=sizes")
    config = compose(TrainConfig, overrides)
    loader = iter(build_data(RunPlan(config)).train_dataloader())

    def from_loader() -> int:
        return sum(int(batch.mask_BL.sum()) for batch in islice(loader, _BATCHES // times))

    contenders = {PEER: by_index, "shards": from_shards, "loader with masking": from_loader}
    runs = {name: _timed(work) for name, work in contenders.items()}
    with contextlib.closing(index):
        return take_turns("random order", runs, pace)


def measure(arguments: argparse.Namespace, folder: Path) -> list[Comparison]:
    """Writes the inputs and makes the chosen comparisons."""
    fasta, pace = arguments.fasta, QUICK if arguments.quick else THOROUGH
    if fasta is None:
        fasta = folder / "synthetic.fasta.gz"
        synthetic_fasta.write(fasta, 1_000 if arguments.quick else 125_000)
    held = []
    if "preparing" in arguments.only:
        held.append(preparing(fasta, folder, pace))
    if "reading" in arguments.only:
        held += reading(folder, 1 << (18 if arguments.quick else 24), pace)
    if "feeding" in arguments.only:
        prepare_anew(fasta, folder / "data")
        held.append(feeding(fasta, folder / "data", pace))
    return held


def main() -> None:
    """Measures, prints the tables, and writes the JSON file.

    Raises:
        UserError: a file cannot be read or written.
    """
    parser = options("benchmark_data", "preparing, reading and feeding")
    parser.add_argument("--fasta", type=Path, help="default: 125,000 synthetic records")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="protlm-bench-") as name:
        held = measure(arguments, Path(name))
    whole = [each for each in held if each.work != "random order"]
    report(
        arguments.json,
        {"data": held},
        (PEER, "1 worker"),
        speed_table("The same records", held, PEER),
        median_table("Seconds for the whole file", whole, scale=1.0),
    )


if __name__ == "__main__":
    exit_with_message(main)
