"""Rounds: cases that take turns, so that a machine that is busy for a while slows them all."""

import math
import random
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median

import torch

from benchmarks.cases import Case
from benchmarks.contenders import Contender
from benchmarks.heap import give_back_freed_memory
from benchmarks.own_process import OwnProcess
from benchmarks.passes import Bytes, Passes, Seconds, standard_normal_inputs
from benchmarks.peers import UnavailableError

# A case that is expected to take more than this for one pass is left out, unless a bar needs it.
MOST_SECONDS, MOST_BYTES = 2.0, 2e9

# Cheap cases are repeated for about this long; a pass that takes it needs no other to warm it up,
# while each shorter one that is timed follows one that is not.
_SECONDS_OF_A_CASE = 0.5
_BYTES_OF_A_LARGE_PASS = 1 << 28
_FEWEST_TURNS, _FEWEST_TURNS_FOR_A_BAR, _MOST_TURNS = 3, 5, 9


@dataclass
class Round:
    """What was measured of cases that took turns: times by the number of the turn."""

    cases: tuple[Case, ...]
    seconds: dict[Case, dict[int, Seconds]] = field(default_factory=dict)
    bytes: dict[Case, Bytes] = field(default_factory=dict)
    left_out: dict[Case, str] = field(default_factory=dict)

    def median(self, case: Case, part: str = "total") -> float:
        """The median time of a case: of its `forward`, its `backward`, or the `total`."""
        return median(getattr(seconds, part) for seconds in self.seconds[case].values())

    def ratio(self, case: Case, other: Case, part: str = "total") -> float | None:
        """How many times as long `case` takes as `other`: the median over their common turns."""
        ours, theirs = self.seconds.get(case, {}), self.seconds.get(other, {})
        common = sorted(ours.keys() & theirs.keys())
        if not common:
            return None
        return median(getattr(ours[turn], part) / getattr(theirs[turn], part) for turn in common)


class Forecast:
    """What a case will cost, by a power law through the two longest of its kind so far."""

    def __init__(self) -> None:
        self._seconds: dict[Case, dict[int, float]] = {}
        self._peaks: dict[Case, dict[int, float]] = {}

    def learn(self, case: Case, *, seconds: float, peak: float) -> None:
        """Takes down what a case has cost."""
        self._seconds.setdefault(case.at(0), {})[case.length] = seconds
        self._peaks.setdefault(case.at(0), {})[case.length] = peak

    def reason_against(self, case: Case) -> str | None:
        """Why the case should be left out, or nothing."""
        if case.at(0) not in self._seconds:
            return None
        seconds = extrapolate(self._seconds[case.at(0)], case.length)
        peak = extrapolate(self._peaks[case.at(0)], case.length)
        if seconds > MOST_SECONDS:
            return f"a pass would take about {seconds:.0f} s, more than {MOST_SECONDS:.0f}"
        if peak > MOST_BYTES:
            return f"a pass would take about {peak / 1e9:.0f} GB, more than {MOST_BYTES / 1e9:.0f}"
        return None


def extrapolate(costs: Mapping[int, float], length: int) -> float:
    """What a length will cost, by a power law through the two longest costs known."""
    *_, longest = sorted(costs)
    exponent = 2.0
    if len(costs) > 1 and all(costs.values()):
        shorter = sorted(costs)[-2]
        exponent = math.log(costs[longest] / costs[shorter]) / math.log(longest / shorter)
    # Short lengths are all overhead, and a busy moment must not foretell more than a square.
    return costs[longest] * (length / longest) ** min(max(exponent, 1.0), 2.0)


def hold_round(
    cases: Iterable[Case],
    entrants: Mapping[str, Contender],
    *,
    needed: Collection[Case],
    forecast: Forecast,
    device: torch.device,
) -> Round:
    """Lets cases take turns, each as often as its cost allows.

    Args:
        cases: who takes part; a case that is named twice does so once.
        entrants: the contenders by name.
        needed: the cases that are never left out for their cost, and have more turns.
        forecast: what the rounds before have cost; learns from this one.
        device: where everything runs.
    """
    held = Round(tuple(dict.fromkeys(cases)))
    with ExitStack() as stack:
        passes = _prepare(held, entrants, needed, forecast, device, stack)
        turns = _first_turn(held, passes, needed, device)
        for turn in range(1, max(turns.values(), default=0)):
            for case in _in_new_order([case for case in turns if turn < turns[case]], turn):
                if 0 not in held.seconds[case]:
                    # Else a short pass would pay for pages and caches that another left cold.
                    passes[case].timed()
                held.seconds[case][turn] = passes[case].timed()
                _tidy_after(held.bytes[case], device)
    for case in held.seconds:
        forecast.learn(case, seconds=held.median(case), peak=held.bytes[case].peak)
    return held


def _prepare(
    held: Round,
    entrants: Mapping[str, Contender],
    needed: Collection[Case],
    forecast: Forecast,
    device: torch.device,
    stack: ExitStack,
) -> dict[Case, Passes | OwnProcess]:
    """Who can take part; of equal inputs there is one copy."""
    passes: dict[Case, Passes | OwnProcess] = {}
    inputs = cache(partial(standard_normal_inputs, device=device))
    for case in held.cases:
        too_costly = forecast.reason_against(case)
        try:
            if too_costly and case not in needed:
                raise UnavailableError(too_costly)
            attend = entrants[case.contender].prepare(case, device)
        except UnavailableError as error:
            held.left_out[case] = str(error)
            continue
        if too_costly and device.type == "cpu":
            # What is left in its heap must not meet what others have left in theirs.
            passes[case] = stack.enter_context(OwnProcess(entrants[case.contender], case))
        else:
            passes[case] = Passes(attend, inputs(case.length, case.dtype))
    return passes


def _first_turn(
    held: Round,
    passes: Mapping[Case, Passes | OwnProcess],
    needed: Collection[Case],
    device: torch.device,
) -> dict[Case, int]:
    """Warms up, measures memory, and says before which turn each case has to end."""
    turns = {}
    for case in _in_new_order(list(passes), 0):
        try:
            first, taken = passes[case].measured()
        except RuntimeError as error:
            # Out of memory, or no kernel for this dtype: said in the tables, not hidden.
            held.left_out[case] = f"failed: {str(error).splitlines()[0]}"
            continue
        held.bytes[case] = taken
        _tidy_after(taken, device)
        warm = first.total >= _SECONDS_OF_A_CASE
        held.seconds[case] = {0: first} if warm else {}
        fewest = _FEWEST_TURNS_FOR_A_BAR if case in needed else _FEWEST_TURNS
        wanted = math.ceil(_SECONDS_OF_A_CASE / first.total)
        turns[case] = min(max(wanted, fewest), _MOST_TURNS) + (0 if warm else 1)
    return turns


def _tidy_after(taken: Bytes, device: torch.device) -> None:
    if device.type == "cpu" and taken.peak > _BYTES_OF_A_LARGE_PASS:
        give_back_freed_memory()


def _in_new_order(cases: list[Case], turn: int) -> list[Case]:
    # Nobody always runs after the one that leaves the caches and the allocator in disorder.
    return random.Random(turn).sample(cases, len(cases))
