"""The approximation study measures what it says: errors of the shipped mechanisms."""

import csv
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.approximation import by_setting, error_table, figure, projection_table, write_csv
from benchmarks.estimates import (
    IID,
    ORTHOGONAL,
    UNIFORM,
    Row,
    Setting,
    curve,
    draw,
    errors,
    estimators,
    features_to_beat_uniform,
    measure,
    mechanism,
)
from benchmarks.uniform import UniformAttention
from protlm.attention.performer.variance import SquareNorms, pair_sums, relative_error
from protlm.attention.performer_softmax import PerformerSoftmax
from protlm.plots import save_figure

EASY, HARD = Setting(64, 8, 0.25), Setting(64, 8, 1.0)
FEATURES = (16, 256, 2048)
SAMPLES = 3


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """A study of two settings, in a second."""
    return [row for setting in (EASY, HARD) for row in measure(setting, FEATURES, SAMPLES)]


def beat(medians: list[float], *, bar: float = 1.0) -> int | None:
    """`features_to_beat_uniform` of errors at R = 1, 2, 3, ... beside uniform attention's."""
    made = [Row(EASY, UNIFORM, "", 0, 0, bar, 0.0)]
    made += [Row(EASY, "positive", ORTHOGONAL, 1 + n, 0, e, 0.0) for n, e in enumerate(medians)]
    return features_to_beat_uniform(made, "positive")


def test_uniform_attention_is_the_mean_of_what_is_there() -> None:
    v_BHLC = torch.randn(2, 3, 5, 4)
    mask_BL = torch.tensor([[True] * 5, [True, True, True, False, False]])
    v_BHLC[1, :, 3:] = torch.nan
    out_BHLC = UniformAttention()(
        v_BHLC, v_BHLC, v_BHLC, hidden_BLD=v_BHLC[:, 0], mask_BL=mask_BL, causal=False
    )
    means = v_BHLC[1, :, :3].mean(dim=1, keepdim=True).expand(-1, 3, -1)
    torch.testing.assert_close(out_BHLC[1, :, :3], means)
    assert torch.equal(out_BHLC[1, :, 3:], torch.zeros(3, 2, 4))


def test_errors_are_relative_and_mean_squares() -> None:
    exact_BHLC = torch.tensor([3.0, 4.0])
    assert errors(exact_BHLC, exact_BHLC) == (0.0, 0.0)
    assert errors(torch.zeros(2), exact_BHLC) == (1.0, 12.5)
    # What no float32 square could hold.
    assert math.isfinite(errors(torch.full((2,), 1e30), exact_BHLC)[1])


@pytest.mark.parametrize("setting", [EASY, HARD, Setting(128, 64, 0.5)])
def test_norms_are_those_of_the_inputs(setting: Setting) -> None:
    inputs = [draw(setting, sample) for sample in range(20)]
    q_BHLK, k_BHLK = (torch.cat([x[side] for x in inputs]) for side in (0, 1))
    norms = SquareNorms.of(
        pair_sums(q_BHLK, k_BHLK, torch.ones(q_BHLK.shape[::2]).bool(), causal=False)
    )
    assert norms.sum_H.item() == pytest.approx(setting.mean_square_sum, rel=0.05)


def test_the_predicted_number_of_features_is_that_of_the_shipped_mechanism() -> None:
    setting = Setting(64, 64, math.sqrt(math.log(257) / 16))
    norms = SquareNorms(torch.tensor([setting.mean_square_sum]), torch.zeros(1))
    found = relative_error(PerformerSoftmax(head_dim=64, num_features=256), norms)
    assert setting.features_for_deviation_1 == pytest.approx(256)
    assert found.item() == pytest.approx(1.0)


def test_a_sample_is_a_function_of_its_number() -> None:
    first, again, other = (draw(EASY, sample) for sample in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.q_BHLK, other.q_BHLK)


def test_every_estimator_is_another_one() -> None:
    built = [
        mechanism("performer_softmax", {**o, "projection": p, "num_features": 64}, HARD, seed=0)
        for o, p in product(estimators(HARD).values(), (ORTHOGONAL, IID))
    ]
    inputs = draw(HARD, 0)
    found = [
        errors(
            attention(
                *inputs,
                hidden_BLD=inputs.v_BHLC[:, 0],
                mask_BL=torch.ones(1, HARD.length).bool(),
                causal=False,
            ),
            inputs.v_BHLC,
        )
        for attention in built
    ]
    assert len(set(found)) == len(built) == 12


@pytest.mark.parametrize("projection", [ORTHOGONAL, IID])
@pytest.mark.parametrize("name", estimators(EASY))
def test_easy_inputs_are_estimated(rows: list[Row], name: str, projection: str) -> None:
    group = by_setting(rows)[EASY]
    found = curve(group, name, projection)
    assert found.features.tolist() == list(FEATURES)
    assert found.median[2] < found.median[0] / 2
    assert found.median[2] < curve(group, UNIFORM).median.item()


@pytest.mark.parametrize("name", estimators(EASY))
def test_both_laws_of_rows_are_measured(rows: list[Row], name: str) -> None:
    orthogonal, iid = (curve(by_setting(rows)[EASY], name, law) for law in (ORTHOGONAL, IID))
    assert not np.any(orthogonal.median == iid.median)


def test_hard_inputs_are_not(rows: list[Row]) -> None:
    easy, hard = (curve(group, "positive", ORTHOGONAL) for group in by_setting(rows).values())
    assert np.all(hard.median > 5 * easy.median)


def test_quartiles_are_those_of_the_samples() -> None:
    made = [Row(EASY, "positive", IID, 4, n, float(n), -float(n)) for n in range(5)]
    made.append(Row(EASY, "positive", ORTHOGONAL, 4, 0, 100.0, 100.0))
    found = curve(made, "positive", IID)
    assert [line.tolist() for line in found] == [[4], [1.0], [2.0], [3.0]]
    assert curve(made, "positive", IID, of="mean_square_error").median.tolist() == [-2.0]


def test_use_begins_where_no_more_features_are_worse_than_uniform() -> None:
    assert beat([0.9, 0.8, 0.7]) == 1
    assert beat([2.0, 0.8, 2.0, 0.7]) == 4
    assert beat([2.0, 0.9, math.nan]) is None
    assert beat([1.0, 1.0]) is None


def test_all_errors_are_written_and_drawn(rows: list[Row], tmp_path: Path) -> None:
    write_csv(rows, tmp_path / "rows.csv")
    save_figure(figure(rows), tmp_path / "figure.png")
    lines = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert len(lines) == 2 * SAMPLES * (1 + len(estimators(EASY)) * 2 * len(FEATURES))
    assert {line["deviation"] for line in lines} == {"0.25", "1.0"}
    assert {len(line) for line in lines} == {9}
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_tables_have_a_line_for_every_setting(rows: list[Row]) -> None:
    assert error_table(rows).row_count == 2
    assert projection_table(rows).row_count == 2 * len(FEATURES)
