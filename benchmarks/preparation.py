"""Measures `protlm prepare` on many synthetic records, and what is done with them before training.

python -m benchmarks.preparation [--records 10000000] [--workers 1 2] [--folder DIR]

The FASTA file is made first (`benchmarks/synthetic_fasta.py`), and stays for the next time.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks import synthetic_fasta
from benchmarks.watched import Watched, watch
from protlm.data.manifest import read_manifest
from protlm.errors import exit_with_message

# TrEMBL's releases of the last years have between 140 and 250 million records.
EXTRAPOLATED = 250_000_000


class Prepared(NamedTuple):
    """A preparation: how it went, and what it made."""

    workers: int
    watched: Watched
    records: int
    residues: int
    disk_bytes: int


def measure(fasta: Path, out: Path, workers: int, options: Sequence[str] = ()) -> Prepared:
    """Prepares a file by the command line.

    Raises:
        UserError: `protlm prepare` failed.
    """
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "protlm", "prepare", fasta, "--out", out]
    watched = watch([*command, "--workers", str(workers), *options])
    manifest = read_manifest(out)
    residues = sum(shard.residues for shards in manifest.splits.values() for shard in shards)
    disk = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return Prepared(workers, watched, manifest.counts.records, residues, disk)


def table(found: Sequence[Prepared], fasta: Path) -> Table:
    """What was measured, and the same of 250 million records, in proportion."""
    size = fasta.stat().st_size
    records, residues = found[0].records, found[0].residues
    made = Table(
        *("workers", "minutes", "records/s", "M residues/s", "peak memory", "disk"),
        *(f"hours for {EXTRAPOLATED / 1e6:.0f} M", f"disk for {EXTRAPOLATED / 1e6:.0f} M"),
        box=SIMPLE,
        title=f"protlm prepare: {records:,} records, {residues / 1e9:.2f} G residues, "
        f"{size / 1e9:.2f} GB of FASTA.gz",
        title_justify="left",
    )
    for each in found:
        seconds, times = each.watched.seconds, EXTRAPOLATED / each.records
        made.add_row(
            str(each.workers),
            f"{seconds / 60:.1f}",
            f"{each.records / seconds:,.0f}",
            f"{each.residues / seconds / 1e6:.1f}",
            f"{each.watched.peak_bytes / 1e6:,.0f} MB",
            f"{each.disk_bytes / 1e9:.2f} GB",
            f"{seconds * times / 3600:.1f}",
            f"{each.disk_bytes * times / 1e9:,.0f} GB",
        )
    return made


def measure_uses(data: Path, records: int) -> Table:
    """What is done with a data set before training: time and memory of each command.

    Raises:
        UserError: a command failed.
    """
    made = Table(
        *("command", "seconds", "peak memory", f"minutes for {EXTRAPOLATED / 1e6:.0f} M"),
        box=SIMPLE,
    )
    for command in ("verify", "leakage"):
        watched = watch([sys.executable, "-m", "protlm", "data", command, data])
        minutes = watched.seconds / 60 * EXTRAPOLATED / records
        memory = f"{watched.peak_bytes / 1e6:,.0f} MB"
        made.add_row(f"data {command}", f"{watched.seconds:.0f}", memory, f"{minutes:.0f}")
    return made


def main() -> None:
    """Makes the input if it is not there, prepares and uses it, and prints the tables."""
    parser = argparse.ArgumentParser(description="Measure protlm prepare at scale.")
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--folder", type=Path, default=Path("outputs"), help="needs some 6 GB")
    parser.add_argument("options", nargs="*", help="of protlm prepare, after --")
    arguments = parser.parse_args()
    fasta = arguments.folder / f"synthetic-{arguments.records}.fasta.gz"
    if not fasta.exists():
        arguments.folder.mkdir(parents=True, exist_ok=True)
        synthetic_fasta.write(fasta, arguments.records)
    out = arguments.folder / f"synthetic-{arguments.records}"
    found = [measure(fasta, out, n, arguments.options) for n in arguments.workers]
    console = Console()
    if not console.is_terminal:
        # A file or a pipe has no width: tables keep theirs.
        console.width = 140
    console.print(table(found, fasta))
    console.print(measure_uses(out, found[0].records))
    shutil.rmtree(out)


if __name__ == "__main__":
    exit_with_message(main)
