"""The seven bars that the Performers have to clear, and whether they did.

All at d = 64, H = 8, B = 1, forward and backward, with m = 256 unless a bar says otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from benchmarks.cases import PERFORMER_PYTORCH, SDPA, Case
from benchmarks.rounds import Round

MOST_GIGABYTES = 12.0


class Verdict(NamedTuple):
    """What was measured, and whether it meets what was asked; None where nothing was measured."""

    measured: str
    met: bool | None


class Demand(Protocol):
    """One number that a bar asks for."""

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases that have to take turns with each other."""
        ...

    def judge(self, rounds: Sequence[Round]) -> Verdict:
        """Compares what was asked with what was measured."""
        ...


@dataclass(frozen=True)
class Faster:
    """`ours` takes at most the time of `peer` divided by `times`."""

    ours: Case
    peer: Case
    times: float

    @property
    def cases(self) -> tuple[Case, ...]:
        """See `Demand.cases`."""
        return self.ours, self.peer

    def judge(self, rounds: Sequence[Round]) -> Verdict:
        """See `Demand.judge`."""
        for held in rounds:
            if (speed_up := held.ratio(self.peer, self.ours)) is not None:
                return Verdict(f"{speed_up:.2f}×", speed_up >= self.times)
        return Verdict(_why_not(self.cases, rounds), None)


@dataclass(frozen=True)
class Leaner:
    """`ours` keeps at most 1 / `times` of the bytes that `peer` keeps for backward."""

    ours: Case
    peer: Case
    times: float

    @property
    def cases(self) -> tuple[Case, ...]:
        """See `Demand.cases`."""
        return self.ours, self.peer

    def judge(self, rounds: Sequence[Round]) -> Verdict:
        """See `Demand.judge`."""
        for held in rounds:
            if self.ours in held.bytes and self.peer in held.bytes:
                saving = held.bytes[self.peer].kept / held.bytes[self.ours].kept
                return Verdict(f"1/{saving:.1f} of the memory", saving >= self.times)
        return Verdict(_why_not(self.cases, rounds), None)


@dataclass(frozen=True)
class Linear:
    """A token of `long` takes at most `times` the time of a token of `short`."""

    long: Case
    short: Case
    times: float

    @property
    def cases(self) -> tuple[Case, ...]:
        """See `Demand.cases`."""
        return self.long, self.short

    def judge(self, rounds: Sequence[Round]) -> Verdict:
        """See `Demand.judge`."""
        for held in rounds:
            if (ratio := held.ratio(self.long, self.short)) is not None:
                growth = ratio * self.short.length / self.long.length
                return Verdict(f"{growth:.2f} {self.long.mode}", growth <= self.times)
        return Verdict(_why_not(self.cases, rounds), None)


@dataclass(frozen=True)
class Bar:
    """A row of the table: several demands, all to be met."""

    what: str
    against: str
    asked: str
    demands: tuple[Demand, ...]

    def judge(self, rounds: Sequence[Round]) -> Verdict:
        """Judges every demand; the row is met when all are, and open when one was not measured."""
        verdicts = [demand.judge(rounds) for demand in self.demands]
        return _all_of(verdicts)


def _softmax(causal: bool, length: int, dtype: str = "fp32") -> Case:
    return Case("performer_softmax", 256, causal, length, dtype)


def _peer(causal: bool) -> Case:
    return Case(PERFORMER_PYTORCH, 256, causal, 4096)


def _exact(length: int, dtype: str) -> Case:
    return Case(SDPA, None, False, length, dtype)


BARS = (
    Bar(
        "bidirectional softmax kernel, L=4,096, fp32",
        "performer-pytorch, fp32",
        "1.6× faster, 1/6 of the memory kept for backward",
        (
            Faster(_softmax(False, 4096), _peer(False), 1.6),
            Leaner(_softmax(False, 4096), _peer(False), 6),
        ),
    ),
    Bar(
        "the same in bf16",
        "performer-pytorch, fp32",
        "3× faster",
        (Faster(_softmax(False, 4096, "bf16"), _peer(False), 3),),
    ),
    Bar(
        "causal softmax kernel, L=4,096, fp32",
        "performer-pytorch without its CUDA extension",
        "50× faster, 1/50 of the memory",
        (
            Faster(_softmax(True, 4096), _peer(True), 50),
            Leaner(_softmax(True, 4096), _peer(True), 50),
        ),
    ),
    Bar(
        "bidirectional softmax kernel, L=8,192, fp32; bf16",
        "scaled_dot_product_attention, same dtype",
        "13×; 16× faster",
        (
            Faster(_softmax(False, 8192), _exact(8192, "fp32"), 13),
            Faster(_softmax(False, 8192, "bf16"), _exact(8192, "bf16"), 16),
        ),
    ),
    Bar(
        "bidirectional ReLU, m=64, L=4,096, bf16",
        "scaled_dot_product_attention",
        "35× faster",
        (Faster(Case("performer_relu", 64, False, 4096, "bf16"), _exact(4096, "bf16"), 35),),
    ),
    Bar(
        "time per token at L=65,536 over L=2,048, both modes",
        "itself",
        "at most 1.25",
        (
            Linear(_softmax(False, 65536), _softmax(False, 2048), 1.25),
            Linear(_softmax(True, 65536), _softmax(True, 2048), 1.25),
        ),
    ),
)


def cases_for_bars(*, causal: bool, length: int) -> list[Case]:
    """The cases that the bars need in the round of one mode and length.

    A demand is measured in the round of its longest case.
    """
    demands = [demand for bar in BARS for demand in bar.demands]
    return [
        case
        for demand in demands
        for case in demand.cases
        if demand.cases[0].causal == causal and max(each.length for each in demand.cases) == length
    ]


def judge_memory(gigabytes: Mapping[str, float | str]) -> Verdict:
    """Judges the peak memory of the model by mechanism, or the reason why there is none."""
    return _all_of(
        [
            Verdict(f"{found} ({name})", None)
            if isinstance(found, str)
            else Verdict(f"{found:.1f} GB ({name})", found <= MOST_GIGABYTES)
            for name, found in gigabytes.items()
        ]
    )


def _all_of(verdicts: Sequence[Verdict]) -> Verdict:
    measured = ", ".join(dict.fromkeys(verdict.measured for verdict in verdicts))
    if any(verdict.met is False for verdict in verdicts):
        return Verdict(measured, False)
    open_ = not verdicts or any(verdict.met is None for verdict in verdicts)
    return Verdict(measured, None if open_ else True)


def _why_not(cases: Sequence[Case], rounds: Sequence[Round]) -> str:
    for case in cases:
        for held in rounds:
            if case in held.left_out:
                return f"not measured: {case.label} {held.left_out[case]}"
    return "not measured"
