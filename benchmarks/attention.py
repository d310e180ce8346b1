"""Measures attention against its peers, in one run: time, memory, bars, roofline, figure.

make bench-attention, or: python -m benchmarks.attention [--quick] [--device cuda] [...]

All cases of one mode and length take turns, in a new order each turn, so a machine that is busy for
a while slows them all; what is reported are medians, and medians of the ratios within a turn. What
would take too long or too much memory is left out, and said to be.
"""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import figure, model_memory, results, tables
from benchmarks.bars import Verdict, cases_for_bars, judge_memory
from benchmarks.cases import DTYPES, PERFORMER_PYTORCH, SDPA
from benchmarks.contenders import contenders, grid
from benchmarks.heap import keep_freed_memory
from benchmarks.peers import PEERS
from benchmarks.results import Result
from benchmarks.roofline import Machine, measure_machine
from benchmarks.rounds import Forecast, Round, hold_round
from protlm.attention import names
from protlm.build import pick_device
from protlm.errors import exit_with_message
from protlm.paths import check_output

LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
QUICK_LENGTHS = (512, 1024)
FEATURES = (64, 128, 256)
MODES = ("bidirectional", "causal")
MECHANISMS = ("softmax", "performer_softmax", "performer_relu")
MODELS = ("performer_softmax", "performer_relu")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Measure attention against its peers.")
    parser.add_argument("--quick", action="store_true", help="short lengths, no 36-layer model")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--mechanisms", nargs="+", choices=names(), default=MECHANISMS)
    parser.add_argument("--features", nargs="+", type=int, default=FEATURES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=tuple(DTYPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--keep-freed-memory", action="store_true", help="as jemalloc does, not as glibc does"
    )
    parser.add_argument("--csv", default=Path("outputs/benchmark_attention.csv"), type=Path)
    parser.add_argument("--figure", default=Path("outputs/benchmark_attention.png"), type=Path)
    parsed = parser.parse_args(arguments)
    if parsed.lengths is None:
        parsed.lengths = QUICK_LENGTHS if parsed.quick else LENGTHS
    return parsed


def hold_rounds(arguments: argparse.Namespace, device: torch.device) -> list[Round]:
    """One round for each mode and length, the short ones first."""
    entrants = contenders()
    chosen = [entrants[name] for name in (*PEERS, *arguments.mechanisms)]
    forecast = Forecast()
    rounds = []
    for causal in (mode == "causal" for mode in arguments.modes):
        for length in sorted(arguments.lengths):
            needed = cases_for_bars(causal=causal, length=length)
            cases = grid(
                chosen,
                causal=causal,
                length=length,
                features=arguments.features,
                dtypes=arguments.dtypes,
            )
            _say(f"{'causal' if causal else 'bidirectional'}, L={length:,} ...")
            rounds.append(
                hold_round(
                    [*cases, *needed],
                    entrants,
                    needed=set(needed),
                    forecast=forecast,
                    device=device,
                )
            )
    return rounds


def measure_models(device: torch.device) -> Verdict:
    """The bar of the 36-layer model."""
    found: dict[str, float | str] = {}
    for name in MODELS:
        _say(f"36 layers of {name}, L={model_memory.LENGTH:,} ...")
        found[name] = model_memory.measure(name, device=device)
    return judge_memory(found)


def place(device: torch.device) -> str:
    """The machine, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}), threads: {torch.get_num_threads()}"


def report(found: Sequence[Result], machine: Machine) -> list[Table]:
    """The tables of a run, save that of the bars."""
    ratios = [
        tables.ratio_table(found, peer, part)
        for part in ("forward", "total")
        for peer in (SDPA, PERFORMER_PYTORCH)
    ]
    return [
        *ratios,
        tables.memory_table(found),
        tables.left_out_table(found),
        tables.machine_table(machine),
        tables.roofline_table(found, machine),
    ]


def main() -> None:
    """Measures, prints the tables, and writes the CSV file and the figure.

    Raises:
        UserError: the device cannot be used, or the files cannot be written.
    """
    arguments = parse()
    for path in (arguments.csv, arguments.figure):
        check_output(path, overwrite=True)
    device = pick_device(arguments.device)
    # The profiler, which counts memory, reports each of its starts on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if arguments.keep_freed_memory:
        keep_freed_memory()
    torch.manual_seed(0)
    model = Verdict("not measured (--quick)", None) if arguments.quick else measure_models(device)
    machine = measure_machine(device)
    rounds = hold_rounds(arguments, device)
    # Before and after: a moment in which the machine is busy must not lower the roof.
    machine = machine.or_better(measure_machine(device))
    found = results.of_grid(rounds)

    console = Console()
    if not console.is_terminal:
        # A file or a pipe has no width: tables keep theirs.
        console.width = 140
    console.print(f"One sequence, 8 heads of 64, {place(device)}, torch {torch.__version__}")
    console.print(*report(found, machine), tables.bar_table(rounds, model))
    results.write_csv(found, arguments.csv)
    figure.save(
        figure.cost_figure(found, dtype=arguments.dtypes[0], where=place(device)), arguments.figure
    )
    print(f"Wrote {arguments.csv} and {arguments.figure}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    exit_with_message(main)
