"""The bars: met, missed, or not measured, from times and bytes that are given here."""

from dataclasses import replace

import pytest

from benchmarks import bars
from benchmarks.attention import LENGTHS
from benchmarks.bars import BARS, Faster, Leaner, Linear, cases_for_bars, judge_memory
from benchmarks.cases import DTYPES, Case
from benchmarks.contenders import contenders
from benchmarks.passes import Bytes, Seconds
from benchmarks.rounds import Round

OURS, PEER = Case("ours", None, False, 100), Case("peer", None, False, 100)


def held(seconds: dict[Case, float], kept: dict[Case, int] | None = None) -> Round:
    return Round(
        tuple(seconds),
        {case: {1: Seconds(total / 2, total / 2)} for case, total in seconds.items()},
        {case: Bytes(peak=0, kept=count) for case, count in (kept or {}).items()},
    )


@pytest.mark.parametrize(("times", "met"), [(3.9, True), (4.0, True), (4.1, False)])
def test_faster_divides_the_peer_by_ours(times: float, met: bool) -> None:
    assert Faster(OURS, PEER, times).judge([held({OURS: 0.5, PEER: 2.0})]) == ("4.00×", met)


@pytest.mark.parametrize(("times", "met"), [(6.0, True), (8.0, False)])
def test_leaner_divides_the_bytes_that_are_kept(times: float, met: bool) -> None:
    verdict = Leaner(OURS, PEER, times).judge([held({}, {OURS: 1000, PEER: 7000})])
    assert verdict == ("1/7.0 of the memory", met)


@pytest.mark.parametrize(("long", "met"), [(12.5, True), (12.6, False)])
def test_linear_compares_the_time_of_a_token(long: float, met: bool) -> None:
    verdict = Linear(OURS.at(1000), OURS, 1.25).judge([held({OURS.at(1000): long, OURS: 1.0})])
    assert verdict.met is met


@pytest.mark.parametrize("kind", [Faster, Leaner])
def test_what_was_not_measured_is_neither_met_nor_missed(kind: type[Faster | Leaner]) -> None:
    demand = kind(OURS, PEER, 2.0)
    alone = held({OURS: 1.0}, {OURS: 1})
    assert demand.judge([]) == ("not measured", None)
    alone.left_out[PEER] = "is not installed"
    assert demand.judge([alone]) == ("not measured: peer is not installed", None)


def test_a_row_is_met_when_every_demand_is() -> None:
    bar = bars.Bar("", "", "", (Faster(OURS, PEER, 2.0), Leaner(OURS, PEER, 2.0)))
    seconds = {OURS: 1.0, PEER: 3.0}
    assert bar.judge([held(seconds, {OURS: 1, PEER: 3})]).met is True
    assert bar.judge([held(seconds, {OURS: 2, PEER: 3})]).met is False
    assert bar.judge([held(seconds)]).met is None
    assert bar.judge([held(seconds, {OURS: 1, PEER: 3})]).measured == "3.00×, 1/3.0 of the memory"


def test_the_model_has_to_fit_with_every_mechanism() -> None:
    assert judge_memory({"a": 11.9, "b": 5.0}) == ("11.9 GB (a), 5.0 GB (b)", True)
    assert judge_memory({"a": 12.1, "b": 5.0}).met is False
    assert judge_memory({"a": "failed with exit code -9", "b": 5.0}).met is None


def test_the_bars_are_about_contenders_that_there_are() -> None:
    needed = {case for bar in BARS for demand in bar.demands for case in demand.cases}
    for case in needed:
        assert contenders()[case.contender].has_features == (case.features is not None)
        assert case.dtype in DTYPES and case.length in LENGTHS


def test_every_demand_is_measured_in_one_round() -> None:
    rounds = {
        (causal, length): set(cases_for_bars(causal=causal, length=length))
        for causal in (False, True)
        for length in LENGTHS
    }
    for bar in BARS:
        for demand in bar.demands:
            assert any(set(demand.cases) <= cases for cases in rounds.values())
    # A token of the long sequence is compared with one of the short, in the same turns.
    assert (
        replace(OURS, contender="performer_softmax", features=256, length=2048)
        in rounds[False, 65536]
    )
    assert rounds[False, 512] == set()
