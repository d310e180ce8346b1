"""Runs contenders in turns on the same work and reports ratios against a peer.

A round runs every contender once, in an order that changes from round to round, so a slow moment of
the machine affects all of them. A ratio is the median over the rounds of the ratio within a round,
and its spread reaches from the lowest round to the highest.
"""

import argparse
import json
import math
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from protlm.system.paths import check_output, complete_file
from protlm.system.processes import return_freed_memory
from protlm.training.launch import resolved_precision

# A contender's function runs once and returns its cost in seconds per unit of work.
Run = Callable[[], float]

CPU = torch.device("cpu")
_MOST_REPEATS = 20
_WIDTH_OF_A_FILE = 160


def options(name: str, about: str) -> argparse.ArgumentParser:
    """Returns the options that every benchmark has, which measures `about`."""
    parser = argparse.ArgumentParser(description=f"Measure {about}.")
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds")
    parser.add_argument("--json", type=writable, default=f"outputs/{name}.json")
    return parser


def writable(path: str) -> Path:
    """Returns the path of a file that is written at the end, if it can be."""
    check_output(Path(path), overwrite=True)
    return Path(path)


class UnavailableError(Exception):
    """A contender cannot take part; the message gives the reason."""


@dataclass(frozen=True)
class Pace:
    """How long a comparison takes.

    Attributes:
        seconds: the approximate duration of all rounds together.
        fewest: the lowest number of rounds.
        most: the highest number of rounds.
        turn_seconds: a cheaper contender is repeated within its turn for about this long.
    """

    seconds: float
    fewest: int
    most: int
    turn_seconds: float = 0.0


QUICK = Pace(seconds=0.0, fewest=2, most=2)


@dataclass(frozen=True)
class Ratio:
    """The median of a ratio over the rounds, with the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Ratio":
        """Returns the ratio that summarizes the values of all rounds."""
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        """Formats the median, and the spread in parentheses."""
        return f"{self.median:.3g} ({self.low:.3g}-{self.high:.3g})"


@dataclass
class Comparison:
    """The costs of contenders that took turns on the same work.

    Attributes:
        work: a short description of the work, which heads a column of the tables.
        costs: seconds per unit of work of each contender, one value per round.
        left_out: the reason for each contender that was not measured.
        facts: further numbers of a contender, such as bytes.
    """

    work: str
    costs: dict[str, list[float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, float]] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        """Returns the median cost of a contender, or None if it was not measured."""
        return median(self.costs[name]) if name in self.costs else None

    def speed(self, name: str, peer: str) -> Ratio | None:
        """Returns how many times as fast as `peer` a contender is, or None without either."""
        if name not in self.costs or peer not in self.costs:
            return None
        pairs = zip(self.costs[name], self.costs[peer], strict=True)
        return Ratio.of([theirs / ours for ours, theirs in pairs])

    def as_json(self, peers: Sequence[str]) -> dict[str, Any]:
        """Returns all numbers of the comparison, with the ratios against each of `peers`."""
        medians = {name: self.median(name) for name in self.costs}
        speeds = {
            peer: {name: vars(ratio) for name in self.costs if (ratio := self.speed(name, peer))}
            for peer in peers
            if peer in self.costs
        }
        return {**vars(self), "medians": medians, "times_as_fast_as": speeds}


def take_turns(work: str, contenders: Mapping[str, Run], pace: Pace) -> Comparison:
    """Runs all contenders in rounds, after one run of each that is not counted.

    A contender whose first run fails is left out with the reason. The work is printed, as progress.
    """
    print(f"{work} ...", file=sys.stderr, flush=True)
    comparison, first = Comparison(work), dict[str, float]()
    for name, run in contenders.items():
        start = time.perf_counter()
        try:
            run()
        except (RuntimeError, UnavailableError) as error:
            comparison.left_out[name] = f"failed: {str(error).splitlines()[0]}"
            continue
        first[name] = max(time.perf_counter() - start, 1e-9)
    turns = {name: max(seconds, pace.turn_seconds) for name, seconds in first.items()}
    wanted = round(pace.seconds / sum(turns.values())) if turns else 0
    for number in range(min(max(wanted, pace.fewest), pace.most)):
        for name in random.Random(number).sample(list(first), len(first)):
            cost = _cost_of_a_turn(contenders[name], first[name], pace)
            comparison.costs.setdefault(name, []).append(cost)
    comparison.costs = {name: comparison.costs[name] for name in first}
    return comparison


def _cost_of_a_turn(run: Run, first: float, pace: Pace) -> float:
    repeats = min(round(pace.turn_seconds / first), _MOST_REPEATS)
    if repeats <= 1:
        return run()
    # A short run is slow when another contender has just emptied the caches.
    run()
    return median(run() for _ in range(repeats))


class Forecast:
    """Extrapolates costs from shorter lengths, and refuses those beyond a limit.

    It extrapolates what shorter lengths have cost.

    Args:
        most_seconds: the limit for the seconds of a run.
        most_bytes: the limit for the bytes of a run.
    """

    def __init__(self, most_seconds: float, most_bytes: float = math.inf) -> None:
        self._limits = {"s": (most_seconds, 1.0), "GB": (most_bytes, 1e9)}
        self._known: dict[tuple[str, str], dict[int, float]] = {}

    def learn(self, name: str, length: int, *, seconds: float, size: float = 0.0) -> None:
        """Records the seconds and the bytes of a contender at one length."""
        for unit, cost in (("s", seconds), ("GB", size)):
            self._known.setdefault((name, unit), {})[length] = cost

    def check(self, name: str, length: int) -> None:
        """Checks that a contender stays within the limits.

        Raises:
            UnavailableError: it would exceed one of them.
        """
        for unit, (limit, scale) in self._limits.items():
            known = self._known.get((name, unit))
            if known and (cost := extrapolate(known, length)) > limit:
                raise UnavailableError(
                    f"would take about {cost / scale:.1f} {unit}, more than {limit / scale:g}"
                )


def extrapolate(costs: Mapping[int, float], length: int) -> float:
    """Returns the expected cost of a length, by a power law through the two longest known."""
    *shorter, longest = sorted(costs)
    exponent = 2.0
    if shorter and costs[longest] > 0 and costs[shorter[-1]] > 0:
        growth = costs[longest] / costs[shorter[-1]]
        exponent = math.log(growth) / math.log(longest / shorter[-1])
    # Short lengths are mostly overhead, and a slow moment must not predict more than a square.
    return costs[longest] * (length / longest) ** min(max(exponent, 1.0), 2.0)


def in_process(*arguments: str) -> Any:
    """Returns what a new process of a benchmark prints as its last line, in JSON."""
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def peak(run: Run) -> tuple[float, int]:
    """Returns the cost of a run, and the bytes that it adds to this process at most (Linux)."""
    # Of what earlier runs left, a run would use some again.
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    return run(), memory("VmHWM") - before


def memory(name: str) -> int:
    """Returns the bytes of this process by their name in Linux, of now or at most."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) << 10


def emulates_bfloat16(device: torch.device) -> bool:
    """Returns whether the processor emulates bfloat16, so that speeds would mean nothing."""
    return device.type == "cpu" and resolved_precision("auto", "cpu") == "32-true"


def machine(device: torch.device) -> dict[str, str | int]:
    """Returns a description of the machine: processor, threads, version of torch, date."""
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        file = Path("/proc/cpuinfo")
        lines = file.read_text().splitlines() if file.exists() else []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else platform.processor() or platform.machine()
    return {
        "processor": processor,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def speed_table(
    title: str, held: Sequence[Comparison], peer: str, *, but: Sequence[str] = ()
) -> Table:
    """Returns the table of how many times as fast as `peer` all others are, with the spread."""
    names = [name for name in _measured(held) if name != peer and name not in but]
    rows = {name: [str(each.speed(name, peer) or "") for each in held] for name in names}
    return _table(f"{title}: times as fast as {peer}, median (lowest-highest)", held, rows)


def median_table(title: str, held: Sequence[Comparison], *, scale: float = 1000.0) -> Table:
    """Returns the table of median costs, in milliseconds unless `scale` says otherwise."""
    costs = {name: [each.median(name) for each in held] for name in _measured(held)}
    rows = {
        name: ["" if cost is None else _digits(cost * scale) for cost in of_name]
        for name, of_name in costs.items()
    }
    return _table(title, held, rows)


def fact_table(title: str, held: Sequence[Comparison], fact: str, *, scale: float = 1.0) -> Table:
    """Returns the table of one further number of each contender."""
    rows = {
        name: [
            _digits(each.facts[name][fact] * scale) if name in each.facts else "" for each in held
        ]
        for name in _measured(held)
    }
    return _table(title, held, rows)


def left_out_lines(held: Sequence[Comparison]) -> list[str]:
    """Returns a line for each contender that was left out and the first reason for it."""
    found: dict[str, tuple[str, str]] = {}
    for each in held:
        for name, reason in each.left_out.items():
            found.setdefault(name, (each.work, reason))
    return [f"left out: {name} from {work} on: {why}" for name, (work, why) in found.items()]


def report(
    path: Path,
    groups: Mapping[str, Sequence[Comparison]],
    peers: Sequence[str],
    *tables: Table,
    device: torch.device = CPU,
) -> dict[str, str | int]:
    """Prints the machine, tables and what was left out, and writes all comparisons, by group.

    Returns the machine.
    """
    place, console = machine(device), Console()
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE
    left_out = (line for held in groups.values() for line in left_out_lines(held))
    for part in (", ".join(f"{key} {x}" for key, x in place.items()), *tables, *left_out):
        console.print(part, highlight=False)
    found = {group: [each.as_json(peers) for each in held] for group, held in groups.items()}
    with complete_file(path, overwrite=True) as temporary:
        temporary.write_text(json.dumps({"machine": place, "groups": found}, indent=1) + "\n")
    print(f"Wrote {path}")
    return place


def _digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _measured(held: Sequence[Comparison]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(each.costs for each in held)))


def _table(title: str, held: Sequence[Comparison], rows: Mapping[str, Sequence[str]]) -> Table:
    table = Table(box=SIMPLE, title=title, title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for each in held:
        table.add_column(each.work, justify="right", no_wrap=True)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table
