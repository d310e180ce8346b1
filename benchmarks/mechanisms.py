"""Measures what every attention mechanism costs against the length, beside softmax.

make bench-mechanisms, or: python -m benchmarks.mechanisms [--quick] [...]

One sequence, 8 heads of 64, float32, forward and backward. All mechanisms of a length have the same
inputs and take turns. Each has the options it ships with, and is bidirectional if it can be.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch
from rich.box import SIMPLE
from rich.table import Table

from benchmarks.attention_contenders import ours
from benchmarks.attention_passes import MOST_BYTES, Attend, Case, compare
from benchmarks.figures import FITTED_FROM, cost_figure, exponent, peaks_of, seconds_of
from benchmarks.harness import (
    QUICK,
    Comparison,
    Forecast,
    Pace,
    median_table,
    options,
    report,
    speed_table,
    writable,
)
from protlm.attention import mechanism, names
from protlm.loading import pick_device
from protlm.plots import save_figure
from protlm.system.errors import exit_with_message

LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
QUICK_LENGTHS = (128, 256)
THOROUGH = Pace(seconds=20.0, fewest=3, most=9, turn_seconds=0.2)
# A mechanism that would take longer for a pass is left out.
MOST_SECONDS = 2.0
PEER = "softmax"


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[int, Comparison]:
    """Compares the chosen mechanisms at every length."""
    forecast = Forecast(MOST_SECONDS, MOST_BYTES)
    makers: dict[str, Callable[[Case], Attend]] = {
        name: partial(_make, name) for name in arguments.mechanisms
    }
    found = {}
    for length in sorted(arguments.lengths or (QUICK_LENGTHS if arguments.quick else LENGTHS)):
        case = Case(causal=False, length=length, dtype="fp32", device=device)
        found[length] = compare(makers, case, forecast, QUICK if arguments.quick else THOROUGH)
    return found


def _make(name: str, case: Case) -> Attend:
    causal = not mechanism(name).supports_bidirectional
    return ours(name, Case(causal, case.length, case.dtype, case.device))


def growth_table(found: dict[int, Comparison], mechanisms: list[str]) -> Table:
    """Returns the exponents of time and memory in the length."""
    table = Table(
        *("", "exponent of time", "of memory"),
        box=SIMPLE,
        title=f"Growth with the length, from L={FITTED_FROM:,} on",
        title_justify="left",
    )
    for name in mechanisms:
        slopes = [exponent(costs(name, found)) for costs in (seconds_of, peaks_of)]
        if slopes[0] is not None:
            table.add_row(name, *("" if slope is None else f"{slope:.2f}" for slope in slopes))
    return table


def main() -> None:
    """Measures, prints the tables, and writes the JSON file and the figure.

    Raises:
        UserError: the device cannot be used, or the files cannot be written.
    """
    parser = options("benchmark_mechanisms", "all mechanisms against the length")
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--mechanisms", nargs="+", choices=names(), default=names())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--figure", default="outputs/benchmark_mechanisms.png", type=writable)
    arguments = parser.parse_args()
    # The profiler, which counts memory, reports each of its starts on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    device = pick_device(arguments.device)
    torch.manual_seed(0)
    found = measure(arguments, device)
    held = list(found.values())
    place = report(
        arguments.json,
        {"bidirectional, fp32": held},
        (PEER,),
        speed_table("Forward and backward, fp32", held, PEER),
        median_table("Milliseconds", held),
        *([growth_table(found, arguments.mechanisms)] if max(found) > FITTED_FROM else []),
        device=device,
    )
    panels = {
        title: {name: costs(name, found) for name in arguments.mechanisms}
        for title, costs in (("time (s)", seconds_of), ("peak memory (MB)", peaks_of))
    }
    about = f"forward and backward, one sequence, 8 heads of 64, fp32, {place['processor']}"
    save_figure(cost_figure(panels, about=about), arguments.figure, overwrite=True)
    print(f"Wrote {arguments.figure}")


if __name__ == "__main__":
    exit_with_message(main)
