"""Measures the way of the data: files to shards, shards to batches, beside Biopython's parsers.

make bench-data, or: python -m benchmarks.data [--fasta FILE.fasta.gz] [--turns 5] [--quick]

The contenders of a comparison take turns on the same file, and a ratio is the median over the
turns. Preparing means all of it: unpacked, checked, hashed, split, encoded, written, synced.
"""

import argparse
import contextlib
import gzip
import io
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from Bio import SeqIO, SwissProt
from Bio.SeqIO.FastaIO import SimpleFastaParser
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks import data_inputs, synthetic_fasta
from benchmarks.watched import watch
from data_prep.prepare import PrepareOptions, prepare
from data_prep.split import HashSplit
from protlm.build import build_data, compose, open_data
from protlm.config import TrainConfig
from protlm.data.manifest import read_manifest
from protlm.data.records import Tally, read_records
from protlm.data.shards import open_split
from protlm.errors import exit_with_message

Work = Callable[[], object]
MOST_BYTES = 1 << 30


class Bar(NamedTuple):
    """A number that was asked for, what it is, and what was measured."""

    what: str
    asked: float
    measured: float
    unit: str = "×"
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether it is as asked."""
        return self.measured <= self.asked if self.at_most else self.measured >= self.asked


def take_turns(contenders: dict[str, Work], turns: int) -> dict[str, list[float]]:
    """The seconds of every contender in every turn, after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, work in contenders.items():
            start = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def speed(seconds: dict[str, list[float]], name: str, peer: str) -> float:
    """How many times faster than its peer: the median over the turns."""
    pairs = zip(seconds[peer], seconds[name], strict=True)
    return median(theirs / ours for theirs, ours in pairs)


def preparation_bars(fasta: Path, folder: Path, turns: int) -> list[Bar]:
    """FASTA to shards, by one process and two, against reading alone."""

    def make(workers: int) -> Work:
        return lambda: _prepare(fasta, folder / f"workers-{workers}", workers)

    def make_twice() -> None:
        beside = multiprocessing.get_context("fork").Process(
            target=_prepare, args=(fasta, folder / "beside", 1)
        )
        beside.start()
        make(1)()
        beside.join()

    contenders: dict[str, Work] = {"Biopython": lambda: _iterate_fasta(fasta)}
    contenders |= {"one": make(1), "two": make(2), "one, twice at once": make_twice}
    seconds = take_turns(contenders, turns)
    _say_rates("FASTA", fasta, seconds)
    # The cores of a virtual machine share what they run on: no more can be had of two workers.
    most = 2 * speed(seconds, "one, twice at once", "one")
    print(f"two builds that share nothing do {most:.2f} times the work of one in the same time")
    one = speed(seconds, "one", "Biopython")
    return [
        Bar("prepare, 1 worker, against SimpleFastaParser", 0.7, one),
        Bar("prepare, 2 workers, against 1", 1.5, speed(seconds, "two", "one")),
    ]


def _prepare(fasta: Path, out: Path, workers: int) -> None:
    shutil.rmtree(out, ignore_errors=True)
    with contextlib.redirect_stderr(io.StringIO()):
        options = PrepareOptions(workers=workers)
        prepare([fasta], out, split_rule=HashSplit(0.01, 0.01), options=options)


def _iterate_fasta(path: Path) -> None:
    with gzip.open(path, "rt") as file:
        for _ in SimpleFastaParser(file):
            pass


def reading_bars(folder: Path, num_bytes: int, turns: int) -> list[Bar]:
    """Flat files and XML to records, against Biopython's parsers."""
    flat, xml = folder / "entries.dat.gz", folder / "entries.xml.gz"
    data_inputs.write_flat_file(flat, num_bytes)
    data_inputs.write_xml(xml, num_bytes)

    def iterate_flat() -> None:
        with gzip.open(flat, "rt") as file:
            for _ in SwissProt.parse(file):
                pass

    def iterate_xml() -> None:
        with gzip.open(xml, "rb") as file:
            for _ in SeqIO.parse(file, "uniprot-xml"):
                pass

    bars = []
    for path, peer, asked in ((flat, iterate_flat, 5.0), (xml, iterate_xml, 1.5)):
        seconds = take_turns({"Biopython": peer, "ours": lambda p=path: _iterate(p)}, turns)
        _say_rates(path.name, path, seconds)
        ratio = speed(seconds, "ours", "Biopython")
        bars.append(Bar(f"{path.name.split('.')[1]} to records, against Biopython", asked, ratio))
    return bars


def _iterate(path: Path) -> None:
    for _ in read_records(path, Tally()):
        pass


def access_bar(data: Path, turns: int) -> Bar:
    """Sequences in a random order, each copied, by one process."""
    split = open_split(data, "train", verify="sizes", shuffled=True)
    order = np.random.default_rng(0).permutation(len(split)).tolist()

    def read() -> None:
        for index in order:
            split[index].copy()

    seconds = median(take_turns({"read": read}, turns)["read"])
    return Bar("random access", 200_000, len(order) / seconds, " sequences/s")


def loader_bar(data: Path, batches: int) -> Bar:
    """Batches with masking, made by one worker process and received here."""
    overrides = (f"data.dir={data}", "data.num_workers=1", "data.verify=sizes")
    config = compose(TrainConfig, overrides)
    loader = iter(build_data(*open_data(config.data), config).train_dataloader())
    # The worker starts, and works ahead.
    for _ in range(batches // 4):
        next(loader)
    start = time.perf_counter()
    residues = sum(int(next(loader).mask_BL.sum()) for _ in range(batches))
    rate = residues / (time.perf_counter() - start) / 1e6
    return Bar("a loader's worker, with masking", 1.5, rate, " M residues/s")


def memory_bars(fasta: Path, folder: Path) -> list[Bar]:
    """The peak of `protlm prepare`, all its processes, beyond its largest shard."""
    bars = []
    for workers in (1, 2):
        out = folder / f"memory-{workers}"
        command = [sys.executable, "-m", "protlm", "prepare", fasta, "--out", out]
        peak = watch([*command, "--workers", str(workers)]).peak_bytes
        shards = [shard for shards in read_manifest(out).splits.values() for shard in shards]
        beyond = peak - max((out / shard.file).stat().st_size for shard in shards)
        what = f"peak memory of prepare less a shard, workers: {workers}"
        bars.append(Bar(what, MOST_BYTES / 1e6, beyond / 1e6, " MB", at_most=True))
    return bars


def bar_table(bars: Sequence[Bar]) -> Table:
    """What was asked, measured, and met."""
    table = Table("what", "asked", "measured", "met", box=SIMPLE)
    for bar in bars:
        asked = f"{'at most' if bar.at_most else 'at least'} {bar.asked:,g}{bar.unit}"
        measured = f"{bar.measured:,.{0 if bar.asked > 100 else 2}f}{bar.unit}"
        table.add_row(bar.what, asked, measured, "yes" if bar.met else "no")
    return table


def _say_rates(what: str, path: Path, seconds: dict[str, list[float]]) -> None:
    with gzip.open(path) as file:
        size = sum(len(chunk) for chunk in iter(lambda: file.read(1 << 20), b""))
    rates = (f"{name} {size / median(s) / 1e6:,.0f} MB/s" for name, s in seconds.items())
    print(f"{what}, {size / 1e6:,.0f} MB unpacked: {', '.join(rates)}", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Measure the way of the data.")
    parser.add_argument("--fasta", type=Path, help="default: 125,000 synthetic records")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--quick", action="store_true", help="little data, one turn")
    parsed = parser.parse_args(arguments)
    parsed.turns = parsed.turns or (1 if parsed.quick else 5)
    return parsed


def main() -> None:
    """Measures everything, and prints what was asked beside it."""
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="protlm-bench-") as name:
        folder = Path(name)
        fasta = arguments.fasta
        if fasta is None:
            fasta = folder / "synthetic.fasta.gz"
            synthetic_fasta.write(fasta, 2_000 if arguments.quick else 125_000)
        bars = preparation_bars(fasta, folder, arguments.turns)
        bars += reading_bars(folder, 1 << (20 if arguments.quick else 24), arguments.turns)
        data = folder / "workers-1"
        bars.append(access_bar(data, arguments.turns))
        bars.append(loader_bar(data, 20 if arguments.quick else 400))
        bars += memory_bars(fasta, folder)
    console = Console()
    if not console.is_terminal:
        # A file or a pipe has no width: tables keep theirs.
        console.width = 140
    console.print(bar_table(bars))


if __name__ == "__main__":
    exit_with_message(main)
