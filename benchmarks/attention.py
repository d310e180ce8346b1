"""Measures the time and the memory of attention beside its peers.

make bench-attention, or: python -m benchmarks.attention [--quick] [--device cuda] [...]

One sequence, 8 heads of 64, forward and backward. All contenders of a mode, precision and length
have the same inputs and take turns. The peers are PyTorch's exact attention (SDPA), cuDNN,
performer-pytorch and fla-core; those with random features have as many as `performer_softmax`.
`performer_relu` has the 64 coordinates of a head as features, as it ships.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from rich.table import Table

from benchmarks import attention_contenders as peers
from benchmarks.attention_contenders import PERFORMER_PYTORCH, SDPA
from benchmarks.attention_passes import DTYPES, MOST_BYTES, Attend, Case, compare
from benchmarks.figures import cost_figure, seconds_of
from benchmarks.harness import (
    QUICK,
    Comparison,
    Forecast,
    Pace,
    emulates_bfloat16,
    fact_table,
    median_table,
    options,
    report,
    speed_table,
    writable,
)
from protlm.loading import pick_device
from protlm.plots import save_figure
from protlm.system.errors import exit_with_message

LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
QUICK_LENGTHS = (128, 256)
MODES = ("bidirectional", "causal")
# A contender that would take longer for a pass is left out.
MOST_SECONDS = 10.0

ByLength = dict[int, Comparison]

# The seconds that the contenders of one length take together.
SECONDS = 10.0


def makers(features: int) -> dict[str, Callable[[Case], Attend]]:
    """Returns the functions that build the contenders, by name."""
    return {
        SDPA: peers.sdpa,
        "cuDNN": peers.cudnn,
        PERFORMER_PYTORCH: partial(peers.performer_pytorch, features=features),
        "fla-core": partial(peers.fla_core, features=features),
        "performer_softmax": partial(peers.ours, "performer_softmax", features=features),
        "performer_relu": partial(peers.ours, "performer_relu"),
        "softmax": partial(peers.ours, "softmax"),
    }


def measure(
    arguments: argparse.Namespace, device: torch.device
) -> dict[str, dict[int, Comparison]]:
    """Compares all contenders; returns the comparisons by length, by mode and precision."""
    found: dict[str, dict[int, Comparison]] = {}
    contenders = makers(arguments.features)
    for mode, dtype in product(arguments.modes, arguments.dtypes):
        if dtype == "bf16" and emulates_bfloat16(device):
            print("bf16 is not measured: this processor emulates it", file=sys.stderr)
            continue
        forecast = Forecast(MOST_SECONDS, MOST_BYTES)
        print(f"{mode}, {dtype}", file=sys.stderr, flush=True)
        held = found.setdefault(f"{mode}, {dtype}", {})
        usual = QUICK_LENGTHS if arguments.quick else LENGTHS
        for length in sorted(arguments.lengths or usual):
            case = Case(mode == "causal", length, dtype, device)
            thorough = Pace(arguments.seconds, fewest=3, most=9, turn_seconds=0.2)
            pace = QUICK if arguments.quick else thorough
            held[length] = compare(contenders, case, forecast, pace)
    return found


def tables(group: str, by_length: ByLength) -> list[Table]:
    """Returns the tables of one mode and precision."""
    held = list(by_length.values())
    return [
        speed_table(group, held, SDPA),
        # The ReLU kernel has other features, and exact attention has none.
        speed_table(group, held, PERFORMER_PYTORCH, but=("performer_relu", "softmax", SDPA)),
        median_table(f"{group}: milliseconds", held),
        fact_table(
            f"{group}: bytes kept for the backward pass, per position and head",
            held,
            "kept_per_position_and_head",
        ),
    ]


def main() -> None:
    """Measures, prints the tables, and writes the JSON file and the figure.

    Raises:
        UserError: the device cannot be used, or the files cannot be written.
    """
    parser = options("benchmark_attention", "attention beside its peers")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--features", type=int, default=256, help="random features")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=tuple(DTYPES))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each length")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--figure", default="outputs/benchmark_attention.png", type=writable)
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    # The profiler, which counts memory, reports each of its starts on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.manual_seed(0)
    found = measure(arguments, device)
    parts = (part for group in found.items() for part in tables(*group))
    groups = {group: list(by_length.values()) for group, by_length in found.items()}
    place = report(arguments.json, groups, (SDPA, PERFORMER_PYTORCH), *parts, device=device)
    panels = {
        f"{group}: time (s)": {name: seconds_of(name, held) for name in makers(1)}
        for group, held in found.items()
    }
    if panels:
        about = f"forward and backward, one sequence, 8 heads of 64, {place['processor']}"
        save_figure(cost_figure(panels, about=about), arguments.figure, overwrite=True)
        print(f"Wrote {arguments.figure}")


if __name__ == "__main__":
    exit_with_message(main)
