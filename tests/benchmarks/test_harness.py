"""The harness: contenders take turns in every round, and medians and ratios are right."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import harness
from benchmarks.harness import (
    QUICK,
    Comparison,
    Forecast,
    Pace,
    Ratio,
    UnavailableError,
    extrapolate,
    fact_table,
    left_out_lines,
    median_table,
    speed_table,
    take_turns,
    write_json,
)

HELD = Comparison(
    "L=8",
    costs={"ours": [1.0, 2.0, 1.0], "peer": [3.0, 4.0, 30.0]},
    left_out={"absent": "is not installed"},
    facts={"ours": {"peak_bytes": 8e6}},
)


def test_a_ratio_is_the_median_of_the_ratios_within_a_round() -> None:
    # The ratio of the medians would be 4.
    assert HELD.speed("ours", "peer") == Ratio(3.0, 2.0, 30.0)
    assert HELD.speed("peer", "ours") == Ratio(1 / 3, 1 / 30, 1 / 2)
    assert HELD.median("peer") == 4.0
    assert HELD.speed("ours", "absent") is None and HELD.median("absent") is None
    assert str(Ratio.of([0.5, 2.0, 1.0])) == "1 (0.5-2)"


def test_every_round_runs_every_contender_once_in_a_new_order() -> None:
    calls: list[str] = []

    def contender(name: str) -> harness.Run:
        def run() -> float:
            calls.append(name)
            return float(len(calls))

        return run

    names = ["a", "b", "c"]
    pace = Pace(seconds=0.0, fewest=8, most=9)
    held = take_turns("x", {name: contender(name) for name in names}, pace)
    rounds = [calls[start : start + 3] for start in range(0, len(calls), 3)]
    assert rounds[0] == names
    assert all(sorted(each) == names for each in rounds) and len(rounds) == 1 + 8
    assert len({tuple(each) for each in rounds[1:]}) > 2
    # The first run of each is not counted, and the others are in the order of the rounds.
    assert {name: len(costs) for name, costs in held.costs.items()} == dict.fromkeys(names, 8)
    assert all(costs == sorted(costs) and costs[0] > 3 for costs in held.costs.values())


def test_a_cheap_contender_is_repeated_within_its_turn() -> None:
    costs = iter(range(1000))
    pace = Pace(seconds=0.0, fewest=2, most=2, turn_seconds=0.05)
    held = take_turns("x", {"cheap": lambda: float(next(costs))}, pace)
    # Run 0 is not counted; a turn has one more such run and 20 that count, 2 to 21 and 23 to 42.
    assert held.costs["cheap"] == [11.5, 32.5]


def test_a_contender_that_fails_is_left_out() -> None:
    def broken() -> float:
        raise RuntimeError("no kernel for this dtype\nand more")

    held = take_turns("x", {"broken": broken, "sound": lambda: 1.0}, QUICK)
    assert held.costs == {"sound": [1.0, 1.0]}
    assert held.left_out == {"broken": "failed: no kernel for this dtype"}


@pytest.mark.parametrize(("costs", "expected"), [({1: 1.0, 2: 2.0}, 4.0), ({1: 1.0, 2: 4.0}, 16.0)])
def test_costs_are_extrapolated_by_a_power_law(costs: dict[int, float], expected: float) -> None:
    assert extrapolate(costs, 4) == pytest.approx(expected)
    assert extrapolate({2: 1.0}, 4) == 4.0
    # A slow moment predicts no more than a square.
    assert extrapolate({1: 1.0, 2: 100.0}, 4) == 400.0


def test_a_forecast_refuses_what_exceeds_a_limit() -> None:
    forecast = Forecast(most_seconds=2.0, most_bytes=1e9)
    forecast.check("new", 1 << 20)
    forecast.learn("slow", 64, seconds=1.0)
    forecast.check("slow", 64)
    with pytest.raises(UnavailableError, match=r"about 4\.0 s, more than 2"):
        forecast.check("slow", 128)
    forecast.learn("large", 64, seconds=0.0, size=6e8)
    with pytest.raises(UnavailableError, match=r"about 2\.4 GB, more than 1"):
        forecast.check("large", 128)


def test_bfloat16_is_emulated_only_on_a_processor_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for precision, emulates in (("32-true", True), ("bf16-mixed", False)):
        monkeypatch.setattr(harness, "resolved_precision", lambda *_, found=precision: found)
        assert harness.emulates_bfloat16(torch.device("cpu")) is emulates
        assert not harness.emulates_bfloat16(torch.device("cuda"))


def test_tables_and_json_hold_the_numbers(tmp_path: Path) -> None:
    def cells(table: harness.Table) -> list[list[str]]:
        return [list(map(str, column.cells)) for column in table.columns]

    assert cells(speed_table("x", [HELD], "peer")) == [["ours"], ["3 (2-30)"]]
    assert cells(median_table("x", [HELD])) == [["ours", "peer"], ["1,000", "4,000"]]
    assert cells(fact_table("x", [HELD], "peak_bytes", scale=1e-6)) == [["ours", "peer"], ["8", ""]]
    assert left_out_lines([HELD]) == ["left out: absent from L=8 on: is not installed"]
    place = harness.machine(torch.device("cpu"))
    assert {"processor", "threads", "torch", "date"} <= place.keys()
    write_json(tmp_path / "out.json", place, {"x": [HELD]}, ("peer", "absent"))
    written = json.loads((tmp_path / "out.json").read_text())
    (found,) = written["groups"]["x"]
    assert written["machine"] == place
    assert found["medians"] == {"ours": 1.0, "peer": 4.0}
    assert found["times_as_fast_as"]["peer"]["ours"] == {"median": 3.0, "low": 2.0, "high": 30.0}
