"""Tables, the CSV file and the figure show every case: its ratios, or why it is not there."""

import csv
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks import figure, results, tables
from benchmarks.bars import Verdict
from benchmarks.cases import PERFORMER_PYTORCH, SDPA, Case
from benchmarks.passes import Bytes, Seconds
from benchmarks.results import Result
from benchmarks.roofline import Machine
from benchmarks.rounds import Round

MACHINE = Machine({"fp32": {"a": 1e11, "b": 2e11}, "bf16": {"a": 4e11}}, 1e9, 4e10)


def ours(length: int = 512, dtype: str = "fp32") -> Case:
    return Case("performer_softmax", 256, False, length, dtype)


def exact(length: int = 512, dtype: str = "fp32") -> Case:
    return Case(SDPA, None, False, length, dtype)


def peer(length: int = 512, features: int = 256) -> Case:
    return Case(PERFORMER_PYTORCH, features, False, length)


def round_of(seconds: dict[Case, float], left_out: dict[Case, str] | None = None) -> Round:
    return Round(
        (*seconds, *(left_out or {})),
        {case: {1: Seconds(total * 0.25, total * 0.75)} for case, total in seconds.items()},
        {case: Bytes(peak=8000 * case.length, kept=4000 * case.length) for case in seconds},
        left_out or {},
    )


@pytest.fixture
def found() -> list[Result]:
    reason = "a pass would take about 9 s, more than 4"
    return results.of_grid(
        [
            round_of({exact(): 0.4, peer(): 0.2, peer(features=64): 0.1, ours(): 0.1}),
            # The short case takes turns among the long ones, for a bar; it is no result here.
            round_of({ours(1024): 0.2, ours(512): 99.0}, {exact(1024): reason}),
        ]
    )


def text_of(table: Table) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def rows_of(table: Table) -> list[list[str]]:
    return [
        list(row) for row in zip(*(list(column.cells) for column in table.columns), strict=True)
    ]


def test_a_case_stands_once_in_the_round_of_its_length(found: list[Result]) -> None:
    cases = [result.case for result in found]
    assert cases == [exact(), peer(), peer(features=64), ours(), ours(1024), exact(1024)]


def test_ratios_are_with_the_peer_of_the_same_m(found: list[Result]) -> None:
    by_case = {result.case: result for result in found}
    assert by_case[ours()].times(SDPA) == pytest.approx(0.25)
    assert by_case[ours()].times(PERFORMER_PYTORCH) == pytest.approx(0.5)
    assert by_case[ours(1024)].times(SDPA) is None


def test_the_ratio_table_says_how_many_times_faster(found: list[Result]) -> None:
    rows = rows_of(tables.ratio_table(found, SDPA, "total"))
    assert ["bidirectional", "fp32", "performer_softmax m=256", "4", ""] in rows
    assert ["bidirectional", "fp32", "performer-pytorch m=64", "4", ""] in rows
    assert not [row for row in rows if row[2] == SDPA]
    (only,) = rows_of(tables.ratio_table(found, PERFORMER_PYTORCH, "forward"))
    assert only == ["bidirectional", "fp32", "performer_softmax m=256", "2", ""]


def test_memory_is_per_token_and_head(found: list[Result]) -> None:
    rows = rows_of(tables.memory_table(found))
    assert ["bidirectional", "fp32", "performer_softmax m=256", "1,024", "500", "1,000"] in rows


def test_who_is_left_out_is_named(found: list[Result]) -> None:
    (row,) = rows_of(tables.left_out_table(found))
    assert row[0] == SDPA and row[4] == "1,024" and row[5].startswith("a pass would take")


def test_one_reason_is_told_once() -> None:
    missing = {
        Case(PERFORMER_PYTORCH, features, False, length, dtype): "is not installed"
        for length in (512, 1024)
        for dtype in ("fp32", "bf16")
        for features in (64, 256)
    }
    held = [
        round_of({exact(length): 1.0}, {c: why for c, why in missing.items() if c.length == length})
        for length in (512, 1024)
    ]
    (row,) = rows_of(tables.left_out_table(results.of_grid(held)))
    expected = [PERFORMER_PYTORCH, "bidirectional", "fp32, bf16", "64, 256", "512 to 1,024"]
    assert row == [*expected, "is not installed"]


def test_the_seven_bars_stand_in_the_table() -> None:
    rows = rows_of(tables.bar_table([], Verdict("5.0 GB", True)))
    assert len(rows) == 7
    assert [row[4] for row in rows] == ["-"] * 6 + ["yes"]
    fast = round_of({ours(4096): 0.1, ours(4096, "bf16"): 0.05, peer(4096): 0.2})
    verdicts = [row[3:] for row in rows_of(tables.bar_table([fast], Verdict("13 GB", False)))]
    # Twice as fast, but with the same bytes kept: the first row asks for both.
    assert verdicts[0] == ["2.00×, 1/1.0 of the memory", "no"]
    assert verdicts[1] == ["4.00×", "yes"]
    assert verdicts[6] == ["13 GB", "no"]


def test_the_roofline_table_has_the_share_that_is_reached(found: list[Result]) -> None:
    rows = {row[2]: row for row in rows_of(tables.roofline_table(found, MACHINE))}
    # 1,024 × 8 × 24 × 256 × 64 FLOP at 200 GFLOP/s, and 4 × 256 exponentials each at 1 G/s.
    assert rows["performer_softmax m=256"][4:6] == ["16.1", "8.4"]
    assert rows["performer_softmax m=256"][8] == "12%"
    assert "200 GFLOP/s" in text_of(tables.machine_table(MACHINE))


def test_the_csv_file_has_every_case_and_every_column(found: list[Result], tmp_path: Path) -> None:
    results.write_csv(found, tmp_path / "all.csv")
    with (tmp_path / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found)
    assert list(rows[0]) == results.COLUMNS
    row = next(row for row in rows if row["contender"] == "performer_softmax")
    assert (row["features"], row["length"], row["turns"]) == ("256", "512", "1")
    assert float(row["seconds"]) == pytest.approx(0.1)
    assert float(row["forward_seconds"]) == pytest.approx(0.025)
    assert float(row["times_sdpa"]) == pytest.approx(0.25)
    assert float(row["kept_bytes_per_token_head"]) == 500
    assert rows[-1]["left_out"].startswith("a pass") and rows[-1]["seconds"] == ""


def test_the_figure_has_a_line_for_each_kernel(found: list[Result], tmp_path: Path) -> None:
    relu = {Case("performer_relu", features, False, 512): features / 1e3 for features in (64, 256)}
    drawn = figure.cost_figure(
        [*found, *results.of_grid([round_of(relu)])], dtype="fp32", where="here"
    )
    forward, backward = drawn.axes
    assert forward.get_xscale() == forward.get_yscale() == "log"
    ours = ["protlm, softmax kernel, m=256", "protlm, ReLU kernel, m=64"]
    labels = [str(line.get_label()) for line in forward.lines]
    assert [label for label in labels if "protlm" in label] == ours
    assert "performer-pytorch 1.1.4, m=256" in labels
    (line,) = (line for line in backward.lines if line.get_label() == ours[0])
    assert list(line.get_xdata()) == [512, 1024]
    assert list(line.get_ydata()) == pytest.approx([0.075, 0.15])
    figure.save(drawn, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
