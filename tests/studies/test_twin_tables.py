"""The tables of twins, from sums and logs as evaluations and trainings write them."""

import math
from pathlib import Path

import numpy as np
import pytest

from protlm.analysis.sequence_sums import SequenceSums, write_sums
from studies import twin_tables
from studies.twin_tables import (
    Column,
    curves,
    difference,
    differences_table,
    figures_table,
    read_column,
)

GROUPS = ["Pkinase", "Pkinase", "RRM_1", "E"]
ALL = Column("all", "sums.test.tsv")
NAMES = ["A", "B", "C", "E"]


def write(folder: Path, nats: list[float], correct: list[float]) -> Path:
    """Sums of four proteins with 10, 20, 30 and 40 targets."""
    folder.mkdir()
    targets = np.array([10.0, 20.0, 30.0, 40.0])
    both = [np.array(nats) * targets, np.array(correct) * targets]
    sums = SequenceSums(targets, *both, targets * math.log(18), targets * 0.1, *both)
    write_sums(folder / "sums.tsv", "test", NAMES, GROUPS, sums)
    (folder / "metrics.csv").write_text(
        "step,seconds,valid_loss\n100,3,\n100,,2.9\n200,5,\n200,,2.8\n"
    )
    return folder


@pytest.mark.parametrize(
    ("column", "nats", "accuracy"),
    [
        (ALL, (10 * 1 + 20 * 2 + 30 * 3 + 40 * 2) / 100, 0.1),
        (Column("", ALL.table, kinases=True), (10 * 1 + 20 * 2) / 30, 0.1),
        (Column("", ALL.table, kinases=False), (30 * 3 + 40 * 2) / 70, 0.1),
        # E has no family: its group is its accession.
        (Column("", ALL.table, by_family=True), ((10 * 1 + 20 * 2) / 30 + 3) / 2, 0.1),
    ],
)
def test_a_column_takes_its_proteins(
    column: Column,
    nats: float,
    accuracy: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(twin_tables, "FEWEST_IN_GROUP", 1)
    folder = write(tmp_path / "a", [1, 2, 3, 2], [accuracy] * 4)
    rows = figures_table(
        {("masked", "softmax", "", "0"): folder}, {("masked", "softmax", "", "0"): 2.5}, [column]
    )
    cells = f"| masked | softmax |  | 0 | 2.50 | {math.exp(nats):.2f} / {accuracy:.2%} |"
    assert rows[2] == cells
    assert rows[3] == "| masked | residue frequencies |  |  |  | 18.00 / 10.00% |"


def test_a_mean_over_families_leaves_out_small_ones(tmp_path: Path) -> None:
    groups = ["Pkinase", "Pkinase,fn3", "Pkinase", "Pkinase", "Pkinase", "RRM_1", "E"]
    names = [*"ABCDFG", "E"]
    ones = np.ones(len(names))
    sums = SequenceSums(ones, *[ones] * (len(SequenceSums.__dataclass_fields__) - 1))
    write_sums(tmp_path / "sums.tsv", "test", names, groups, sums)
    assert read_column(tmp_path, ALL).group.tolist() == ["Pkinase"] * 5 + ["RRM_1", "E"]
    by_family = read_column(tmp_path, Column("", ALL.table, by_family=True))
    assert by_family.group.tolist() == ["Pkinase"] * 5
    assert len(by_family.sums.targets) == 5


def test_kinases_are_of_the_family_of_this_name(tmp_path: Path) -> None:
    names = ["Pkinase", "Pkinase_Tyr", "Pkinase_C", "fn3, Pkinase"]
    ones = np.ones(len(names))
    sums = SequenceSums(ones, *[ones] * (len(SequenceSums.__dataclass_fields__) - 1))
    write_sums(tmp_path / "sums.tsv", "test", NAMES, names, sums)
    kinases = read_column(tmp_path, Column("", ALL.table, kinases=True))
    assert len(kinases.group) == 2
    others = read_column(tmp_path, Column("", ALL.table, kinases=False))
    assert set(others.group) == {"Pkinase_Tyr", "Pkinase_C"}


def of_families(folder: Path, families: list[str], nats: list[float]) -> Path:
    """Sums of five proteins of each family, of ten targets each in the first and 30 elsewhere."""
    groups = [family for family in families for _ in range(5)]
    targets = np.array([10.0 if family == families[0] else 30.0 for family in groups])
    both = [np.repeat(nats, 5) * targets, 0.1 * targets]
    sums = SequenceSums(targets, *both, *both, *both)
    folder.mkdir()
    accessions = [f"P{number}" for number in range(len(groups))]
    write_sums(folder / "sums.tsv", "test", accessions, groups, sums)
    return folder


def test_intervals_are_over_families_and_need_five(tmp_path: Path) -> None:
    for size, is_bounded in ((4, False), (5, True)):
        families = list("VWXYZ")[:size]
        above = [1.0] + [0.0] * (size - 1)
        pair = (
            of_families(tmp_path / f"first{size}", families, [2.0] * size),
            of_families(tmp_path / f"second{size}", families, [2.0 + x for x in above]),
        )
        by_family = Column("", ALL.table, by_family=True)
        # Of residues a tenth or less is of the first family; as a family it is a fifth or more.
        for column, expected in ((ALL, 10 / (10 + 30 * (size - 1))), (by_family, 1 / size)):
            (value, _), (low, _), (high, _) = difference([pair], column)
            assert value == pytest.approx(expected)
            # A draw has the first family not at all, or more than once.
            found = (low == 0, high > 1.9 * expected) if is_bounded else np.isnan([low, high])
            assert all(found), column


def test_differences_are_of_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin_tables, "_FEWEST_GROUPS", 3)
    pairs = []
    for seed in range(2):
        # The second is worse by a tenth of a nat for every protein of seed 0, and equal in seed 1.
        first = [1.0, 2.0, 3.0, 4.0]
        second = [x + 0.1 * (1 - seed) for x in first]
        one = write(tmp_path / f"first{seed}", first, [0.1, 0.2, 0.1, 0.2])
        pairs.append((one, write(tmp_path / f"second{seed}", second, [0.15, 0.25, 0.15, 0.25])))
    value, low, high = difference(pairs, ALL)
    assert value == pytest.approx([0.05, 0.05])
    # Both seeds may be seed 0, or seed 1; the difference of accuracy is the same in all draws.
    assert (low[0], high[0]) == (pytest.approx(0), pytest.approx(0.1))
    assert (low[1], high[1]) == (pytest.approx(0.05), pytest.approx(0.05))
    rows = differences_table({("masked", "equal tokens"): pairs}, [ALL])
    assert rows[3].startswith("| masked | equal tokens | 2 | accuracy, points | +5.00 (+5.00 to")


def test_few_families_have_no_interval(tmp_path: Path) -> None:
    first = write(tmp_path / "a", [1, 2, 3, 4], [0.1] * 4)
    second = write(tmp_path / "b", [1.5, 2.5, 3, 4], [0.1] * 4)
    kinases = Column("kinases", ALL.table, kinases=True)
    rows = differences_table({("masked", "equal tokens"): [(first, second)]}, [kinases])
    assert rows[2] == "| masked | equal tokens | 1 | nats | +0.5000 |"


def test_runs_on_different_proteins_are_not_compared(tmp_path: Path) -> None:
    first = write(tmp_path / "a", [1, 2, 3, 4], [0.1] * 4)
    second = write(tmp_path / "b", [1, 2, 3, 4], [0.1] * 4)
    table = second / ALL.table
    table.write_text(table.read_text().replace("RRM_1", "Cyclin_N"))
    with pytest.raises(SystemExit, match="all: the runs were evaluated on different proteins"):
        difference([(first, second)], ALL)


def test_families_are_drawn_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two kinases differ by 20 and -20 nats, together by nothing."""
    monkeypatch.setattr(twin_tables, "_FEWEST_GROUPS", 3)
    first = write(tmp_path / "a", [1, 2, 1, 1], [0.1] * 4)
    second = write(tmp_path / "b", [3, 1, 1, 1], [0.1] * 4)
    for value in difference([(first, second)], ALL):
        assert value == pytest.approx([0, 0])


def test_curves_have_the_validations(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", [1, 1, 1, 1], [0.1] * 4)
    figure = curves({"softmax": (folder, 7200.0)}, tokens_per_step=4096, color=lambda _: "red")
    tokens, hours = (axes.lines[0].get_xdata() for axes in figure.axes)
    assert list(tokens) == pytest.approx([0.4096, 0.8192])
    assert list(hours) == pytest.approx([200, 400])
    assert list(figure.axes[0].lines[0].get_ydata()) == [2.9, 2.8]
