"""Measures training against its peers, in one run: forward, backward and optimiser step.

make bench-training, or: python -m benchmarks.training [--fasta FILE] [--quick] [...]

Six layers, D = 512, 8 heads, F = 1,024, rotary positions, LayerNorm, GELU, no dropout, bf16
autocast, one AdamW for all. On full rows all models have the same batches; on real lengths, of at
most 1,024 tokens, ours have the batches of protlm's loader and the others random ones padded to the
longest, and only tokens that are no padding count. Within a turn every model trains on its next
batches, in a new order each turn; what is reported are medians, and medians of the ratios within a
turn. What would take too long is left out, and said to be.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.data import Bar, bar_table
from benchmarks.heap import keep_freed_memory
from benchmarks.language_models import ESM, Sizes, performer_lm
from benchmarks.same_work import Work
from benchmarks.synthetic_fasta import SAMPLE
from benchmarks.training_batches import Proteins, batches, full_rows
from benchmarks.training_rounds import DTYPE, REAL, Race, Round, workloads
from protlm.errors import exit_with_message
from protlm.paths import check_output, complete_file

LENGTHS, QUICK_LENGTHS = (512, 1024, 4096, 16_384), (512, 1024)
TOKENS = 4096
PEERS = (ESM, performer_lm(256), performer_lm(64))


def bars(rounds: Sequence[Round]) -> list[Bar]:
    """What is asked of the speed, and what was measured of it."""
    held = {each.workload.label: each for each in rounds}
    asked = [
        (REAL, "performer_relu", ESM, 4.0),
        (REAL, "softmax", ESM, 2.0),
        ("L=4,096", "performer_relu", ESM, 5.0),
        ("L=4,096", "performer_relu", performer_lm(256), 1.7),
        ("L=1,024", "softmax", ESM, 1.2),
    ]
    found = []
    for label, ours, peer, least in asked:
        times = held[label].times(ours, peer) if label in held else None
        if times is not None:
            found.append(Bar(f"{label}: {ours} against {peer}", least, times))
    return found


def rate_table(rounds: Sequence[Round]) -> Table:
    """Tokens/s of every model on every workload, or why there are none."""

    def rate(held: Round, name: str) -> str:
        if name in held.left_out:
            return held.left_out[name]
        return f"{median(held.rates[name]):,.0f}"

    return _by_model("Tokens that are no padding, per second", rounds, rate)


def ratio_table(rounds: Sequence[Round], peer: str) -> Table:
    """How many times as fast as a peer every model is."""

    def times(held: Round, name: str) -> str:
        found = held.times(name, peer)
        return "" if found is None else f"{found:.2f}"

    return _by_model(f"Times as fast as {peer}", rounds, times)


def work_table(found: Mapping[str, Work]) -> Table:
    """Whether all do the same work."""
    titles = ("model", "parameters, M", "products, MFLOP a token", "of them in bf16")
    table = Table(
        *(*titles, "random", "loss changed by padding"), box=SIMPLE, title="The same work?"
    )
    for name, work in found.items():
        table.add_row(
            name,
            f"{work.parameters / 1e6:.2f}",
            f"{sum(work.flops.values()) / 1e6:.1f}",
            f"{work.share_of(DTYPE):.1%}",
            "yes" if work.is_random else "no",
            f"{work.padding_effect:.1%}",
        )
    return table


def write_csv(rounds: Sequence[Round], path: Path) -> None:
    """Writes the rate of every turn, and who was left out with the reason."""
    columns = ("workload", "model", "turn", "tokens_per_second", "left_out")
    with complete_file(path, overwrite=True) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for held in rounds:
            label = held.workload.label
            for name, rates in held.rates.items():
                writer.writerows([label, name, *each, ""] for each in enumerate(rates, start=1))
            writer.writerows([label, name, "", "", why] for name, why in held.left_out.items())


def _by_model(title: str, rounds: Sequence[Round], cell: Callable[[Round, str], str]) -> Table:
    labels = (held.workload.label for held in rounds)
    table = Table("model", *labels, box=SIMPLE, title=title, title_justify="left")
    for name in dict.fromkeys(chain.from_iterable((*h.rates, *h.left_out) for h in rounds)):
        table.add_row(name, *(cell(held, name) for held in rounds))
    return table


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Measure training against its peers.")
    parser.add_argument("--quick", action="store_true", help="short rows, a small model")
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--fasta", type=Path, default=SAMPLE, help="default: the shipped sample")
    parser.add_argument("--csv", type=Path, default=Path("outputs/benchmark_training.csv"))
    parsed = parser.parse_args(arguments)
    if parsed.lengths is None:
        parsed.lengths = QUICK_LENGTHS if parsed.quick else LENGTHS
    return parsed


def main() -> None:
    """Measures, prints the tables, and writes the CSV file.

    Raises:
        InputDataError: the sequence file cannot be used.
        OutputError: the CSV file cannot be written.
    """
    arguments = parse()
    check_output(arguments.csv, overwrite=True)
    keep_freed_memory()
    torch.manual_seed(0)
    proteins = Proteins(arguments.fasta)
    sizes = Sizes(num_layers=1, model_dim=64, num_heads=1, feedforward_dim=128)
    race = Race(sizes if arguments.quick else Sizes(), proteins)
    work = race.examine(next(batches(proteins, full_rows(256, 256))))
    rounds = []
    for workload in workloads(arguments.lengths, tokens=TOKENS):
        print(f"{workload.label} ...", file=sys.stderr, flush=True)
        rounds.append(race.hold(workload))
    console = Console()
    if not console.is_terminal:
        # A file or a pipe has no width: tables keep theirs.
        console.width = 160
    console.print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {DTYPE}")
    console.print(work_table(work), rate_table(rounds))
    console.print(*(ratio_table(rounds, peer) for peer in PEERS), bar_table(bars(rounds)))
    write_csv(rounds, arguments.csv)
    print(f"Wrote {arguments.csv}")


if __name__ == "__main__":
    exit_with_message(main)
