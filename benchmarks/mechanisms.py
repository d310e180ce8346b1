"""Measures what every attention mechanism costs against the length, beside softmax.

make bench-mechanisms, or: python -m benchmarks.mechanisms [--quick] [...]

As in benchmarks/attention.py all mechanisms of one length take turns. Each has the options it ships
with, and tables of positions as long as the input. Those with a bidirectional form are measured in
that. A mechanism that claims to be linear is judged by the time of a token at 16,384 positions
against that at 2,048, measured in the same turns.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks import figure, results
from benchmarks.attention import place
from benchmarks.bars import Linear, Verdict
from benchmarks.cases import Case
from benchmarks.contenders import Contender, contenders
from benchmarks.heap import keep_freed_memory
from benchmarks.mechanisms_figure import FITTED_FROM, cost_figure, exponent
from benchmarks.results import Result
from benchmarks.rounds import Forecast, Round, hold_round
from protlm.attention import mechanism, names
from protlm.build import pick_device
from protlm.errors import exit_with_message
from protlm.paths import check_output

LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
QUICK_LENGTHS = (512, 1024)
SHORT, LONG = 2048, 16_384
MOST_GROWTH, MOST_GROWTH_OF = 1.5, {"reformer": 2.0}
# They grow with the square of the length by definition.
QUADRATIC = ("softmax", "aft_full")


def case_of(name: str, length: int) -> Case:
    """A mechanism with the options it ships with, bidirectional if it can be."""
    return Case(name, None, not mechanism(name).supports_bidirectional, length)


def growth_of(name: str) -> Linear | None:
    """What is asked of a mechanism; nothing of those that are quadratic."""
    if name in QUADRATIC:
        return None
    most = MOST_GROWTH_OF.get(name, MOST_GROWTH)
    return Linear(case_of(name, LONG), case_of(name, SHORT), most)


def hold_rounds(chosen: Sequence[str], lengths: Sequence[int], device: torch.device) -> list[Round]:
    """One round for each length, the short ones first."""
    entrants: Mapping[str, Contender] = contenders()
    forecast, rounds = Forecast(), []
    for length in sorted(lengths):
        _say(f"L={length:,} ...")
        demands = [growth_of(name) for name in chosen] if length == LONG else []
        needed = [case for demand in demands if demand for case in demand.cases]
        rounds.append(
            hold_round(
                [*(case_of(name, length) for name in chosen), *needed],
                entrants,
                needed=set(needed),
                forecast=forecast,
                device=device,
            )
        )
    return rounds


def cost_table(chosen: Sequence[str], rounds: Sequence[Round]) -> Table:
    """Time and memory of a token at two lengths, how they grow, and whether that is allowed."""
    table = Table(
        *("mechanism", "mode", f"µs a token, L={SHORT:,}", f"L={LONG:,}", "growth", "at most"),
        *("met", "exponent of time", "of memory", f"peak MB, L={LONG:,}"),
        box=SIMPLE,
        title="Forward and backward, one sequence, 8 heads of 64, fp32; exponents over "
        f"L >= {SHORT:,}",
        title_justify="left",
    )
    for name in chosen:
        demand = growth_of(name)
        verdict = Verdict("", None) if demand is None else demand.judge(rounds)
        table.add_row(
            name,
            case_of(name, 0).mode,
            *(
                _microseconds(_medians(name, rounds).get(length), length)
                for length in (SHORT, LONG)
            ),
            verdict.measured.partition(" ")[0],
            "" if demand is None else f"{demand.times:g}",
            {True: "yes", False: "no", None: "-"}[verdict.met],
            *(
                _decimal(exponent(_long(costs)))
                for costs in (_medians(name, rounds), _peaks(name, rounds))
            ),
            _megabytes(_peaks(name, rounds).get(LONG)),
        )
    return table


def _medians(name: str, rounds: Sequence[Round]) -> dict[int, float]:
    """Seconds by length, each from the round of its own length."""
    return {r.case.length: r.held.median(r.case) for r in _measured(name, rounds)}


def _peaks(name: str, rounds: Sequence[Round]) -> dict[int, float]:
    """Bytes beyond the inputs, by length."""
    return {r.case.length: r.held.bytes[r.case].peak for r in _measured(name, rounds)}


def _measured(name: str, rounds: Sequence[Round]) -> list[Result]:
    return [r for r in results.of_grid(rounds) if r.measured and r.case.contender == name]


def _long(costs: Mapping[int, float]) -> dict[int, float]:
    return {length: cost for length, cost in costs.items() if length >= FITTED_FROM}


def _microseconds(seconds: float | None, length: int) -> str:
    return "" if seconds is None else f"{seconds / length * 1e6:.1f}"


def _decimal(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def _megabytes(size: float | None) -> str:
    return "" if size is None else f"{size / 1e6:,.0f}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Measure all mechanisms against the length.")
    parser.add_argument("--quick", action="store_true", help="short lengths only")
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--mechanisms", nargs="+", choices=names(), default=names())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--csv", default=Path("outputs/benchmark_mechanisms.csv"), type=Path)
    parser.add_argument("--figure", default=Path("outputs/benchmark_mechanisms.png"), type=Path)
    parsed = parser.parse_args(arguments)
    if parsed.lengths is None:
        parsed.lengths = QUICK_LENGTHS if parsed.quick else LENGTHS
    return parsed


def main() -> None:
    """Measures, prints the table, and writes the CSV file and the figure.

    Raises:
        UserError: the files cannot be written.
    """
    arguments = parse()
    for path in (arguments.csv, arguments.figure):
        check_output(path, overwrite=True)
    # The profiler, which counts memory, reports each of its starts on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    keep_freed_memory()
    device = pick_device(arguments.device)
    torch.manual_seed(0)
    rounds = hold_rounds(arguments.mechanisms, arguments.lengths, device)
    found = results.of_grid(rounds)
    console = Console()
    if not console.is_terminal:
        # A file or a pipe has no width: tables keep theirs.
        console.width = 140
    here = place(device)
    console.print(f"{here}, torch {torch.__version__}")
    console.print(cost_table(arguments.mechanisms, rounds))
    results.write_csv(found, arguments.csv)
    figure.save(cost_figure(found, where=here), arguments.figure)
    print(f"Wrote {arguments.csv} and {arguments.figure}")


if __name__ == "__main__":
    exit_with_message(main)
