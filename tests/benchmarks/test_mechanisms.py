"""The cost of all mechanisms: what is asked of whom, exponents, table and figure."""

import csv
from pathlib import Path

import pytest

from benchmarks import mechanisms
from benchmarks.mechanisms import LONG, SHORT, case_of, cost_table, growth_of
from benchmarks.mechanisms_figure import cost_figure, exponent, styles
from benchmarks.passes import Bytes, Seconds
from benchmarks.results import of_grid
from benchmarks.rounds import Round
from protlm.attention import names


def round_of(name: str, length: int, seconds: float, *, short: float | None = None) -> Round:
    """A round of one length; a long one with the short case in the same turns."""
    cases = [case_of(name, length)] + ([case_of(name, SHORT)] if short else [])
    held = Round(tuple(cases))
    for case, taken in zip(cases, (seconds, short), strict=False):
        held.seconds[case] = {1: Seconds(0.0, taken or 0.0)}
        held.bytes[case] = Bytes(peak=1000 * case.length, kept=0)
    return held


def test_all_but_the_quadratic_ones_are_judged() -> None:
    judged = {name for name in names() if growth_of(name)}
    assert judged == set(names()) - {"softmax", "aft_full"}
    for name in judged:
        demand = growth_of(name)
        assert demand is not None
        assert demand.times == (2.0 if name == "reformer" else 1.5)
        assert (demand.short.length, demand.long.length) == (2048, 16_384)


def test_growth_is_that_of_a_token() -> None:
    demand = growth_of("performer_relu")
    assert demand is not None
    linear = round_of("performer_relu", LONG, 8.0, short=1.0)
    assert demand.judge([linear]).met
    assert not demand.judge([round_of("performer_relu", LONG, 13.0, short=1.0)]).met
    # A short case that was measured at another time does not count.
    alone = [round_of("performer_relu", SHORT, 1.0), round_of("performer_relu", LONG, 8.0)]
    assert demand.judge(alone).met is None


def test_the_exponent_is_the_slope() -> None:
    assert exponent({2: 3.0, 4: 6.0, 8: 12.0}) == pytest.approx(1.0)
    assert exponent({2: 4.0, 4: 16.0, 8: 64.0}) == pytest.approx(2.0)
    assert exponent({2: 1.0}) is None


def test_table_and_figure_hold_everyone() -> None:
    rounds = [
        round_of("performer_relu", 1024, 9.0),
        round_of("performer_relu", SHORT, 1.0),
        round_of("performer_relu", LONG, 16.0, short=1.0),
    ]
    table = cost_table(["performer_relu"], rounds)
    found = [next(iter(column.cells)) for column in table.columns]
    # 1 s for 2,048 tokens, 16 s for 16,384: a token takes twice as long, L^(4/3) in all.
    assert found[:7] == ["performer_relu", "bidirectional", "488.3", "976.6", "2.00", "1.5", "no"]
    assert found[7:] == ["1.33", "1.00", "16"]
    figure = cost_figure(of_grid(rounds), where="here")
    assert [len(axes.lines) for axes in figure.axes] == [1, 1]


def test_no_two_mechanisms_look_alike() -> None:
    looks = styles(names())
    assert len(set(looks.values())) == len(names())


def test_a_quick_run_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.rounds._SECONDS_OF_A_CASE", 0.0)
    files = {option: tmp_path / f"out.{option}" for option in ("csv", "figure")}
    options = [text for option, path in files.items() for text in (f"--{option}", str(path))]
    chosen = ["--lengths", "64", "128", "--mechanisms", "softmax", "performer_relu"]
    monkeypatch.setattr("sys.argv", ["mechanisms", *chosen, *options])
    mechanisms.main()
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert {(row["contender"], row["length"]) for row in rows} == {
        (name, length) for name in ("softmax", "performer_relu") for length in ("64", "128")
    }
    assert files["figure"].read_bytes().startswith(b"\x89PNG")
    assert "performer_relu" in capsys.readouterr().out
