"""Replacing the attention of a trained model changes the mechanism alone, and where it is told."""

import csv
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.propagation import figure, layer_table, lost, main, score_table, write_csv
from benchmarks.replacement import favor, square_norms, state_errors, with_attention
from benchmarks.replacement_study import (
    CUMULATIVE,
    PERPLEXITY,
    POSITIVE,
    SINGLE,
    SOFTMAX,
    UNIFORM,
    Row,
    Subject,
    load_softmax,
    medians,
)
from protlm.attention.softmax import Softmax
from protlm.errors import UserError
from protlm.plots import save_figure

FEATURES = (16, 1024)


@pytest.fixture(scope="module")
def softmax_run(train_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A softmax run whose queries and keys have a bounded norm, so that FAVOR+ can estimate it."""
    run = tmp_path_factory.mktemp("runs") / "bounded"
    return train_tiny(run, "attention=softmax", "model.qk_norm=true")


@pytest.fixture(scope="module")
def subject(softmax_run: Path, tiny_data: Path) -> Subject:
    """The run with six proteins of the tiny sample."""
    return Subject(softmax_run, tiny_data, split="valid", proteins=6)


@pytest.fixture(scope="module")
def rows(subject: Subject) -> list[Row]:
    """All that is measured of the run."""
    return [
        *subject.references(),
        *(row for m in FEATURES for draw in (0, 1) for row in subject.estimates(m, draw)),
    ]


def test_softmax_for_softmax_changes_nothing(subject: Subject) -> None:
    same = with_attention(subject.model, lambda layer: Softmax(), (1, 2))
    assert state_errors(subject.model, same, subject.batch) == {1: 0.0, 2: 0.0}


def test_the_model_itself_stays_as_it_was(subject: Subject) -> None:
    before = subject.model(subject.batch).logits_BLV
    replaced = with_attention(subject.model, favor(subject.model, 16, draw=0), (1, 2))
    assert not torch.equal(replaced(subject.batch).logits_BLV, before)
    assert torch.equal(subject.model(subject.batch).logits_BLV, before)


def test_a_block_is_replaced_where_it_stands(subject: Subject) -> None:
    mechanism = favor(subject.model, 16, draw=0)
    errors = state_errors(
        subject.model, with_attention(subject.model, mechanism, [2]), subject.batch
    )
    assert errors[1] == 0.0 < errors[2]


def test_a_draw_is_a_function_of_its_number_and_layer(subject: Subject) -> None:
    def projection(draw: int, layer: int) -> torch.Tensor:
        return favor(subject.model, 16, draw=draw)(layer).get_buffer("projection")

    assert torch.equal(projection(0, 1), projection(0, 1))
    drawn = [projection(draw, layer) for draw in range(3) for layer in (1, 2)]
    assert len({tuple(rows.flatten().tolist()) for rows in drawn}) == 6


def test_optimal_features_are_for_their_own_block(subject: Subject) -> None:
    mechanism = favor(subject.model, 16, draw=0, optimal_for={1: 2.0, 2: 5.0})
    built = [mechanism(layer) for layer in (1, 2)]
    assert [getattr(attention, "optimal_for", None) for attention in built] == [2.0, 5.0]


def test_norms_are_within_the_bound(subject: Subject) -> None:
    norms = square_norms(subject.model, subject.batch)
    assert list(norms) == [1, 2]
    # |q̂|² and |k̂|² are below 3 each with model.qk_norm=true, and 1 at the start.
    assert all(0 < norm < 12 for layer in norms.values() for norm in layer.sum_H.tolist())


def test_the_first_block_has_none_before_it(rows: list[Row]) -> None:
    assert [r.value for r in rows if (r.quantity, r.layer) == (CUMULATIVE, 1)] == [
        r.value for r in rows if (r.quantity, r.layer) == (SINGLE, 1)
    ]


def test_a_block_alone_is_that_block(subject: Subject, rows: list[Row]) -> None:
    second = with_attention(subject.model, favor(subject.model, 16, draw=0), [2])
    assert [
        r.value
        for r in rows
        if (r.estimator, r.num_features, r.draw, r.quantity, r.layer)
        == (POSITIVE, 16, 0, SINGLE, 2)
    ] == [state_errors(subject.model, second, subject.batch)[2]]


def test_more_features_are_closer_to_softmax(rows: list[Row]) -> None:
    for quantity in (CUMULATIVE, SINGLE):
        errors = medians(rows, "bounded", POSITIVE, quantity)
        few, many = ([errors[m, layer] for layer in (1, 2)] for m in FEATURES)
        assert all(0 < close < far / 2 for far, close in zip(few, many, strict=True))


def test_scores_are_of_the_first_draw(rows: list[Row]) -> None:
    scored = [(r.estimator, r.num_features, r.draw) for r in rows if r.quantity == PERPLEXITY]
    assert sorted(scored) == [
        *(("OPRF", m, 0) for m in FEATURES),
        *((POSITIVE, m, 0) for m in FEATURES),
        (SOFTMAX, 0, 0),
        (UNIFORM, 0, 0),
    ]


def test_what_is_lost_is_counted_from_softmax_to_uniform() -> None:
    made = [
        Row("m", name, features, 0, PERPLEXITY, 0, value)
        for name, features, value in ((SOFTMAX, 0, 10.0), (UNIFORM, 0, 40.0), (POSITIVE, 64, 20.0))
    ]
    assert [lost(made, "m", *which) for which in ((SOFTMAX, 0), (UNIFORM, 0))] == [0.0, 1.0]
    assert lost(made, "m", POSITIVE, 64) == pytest.approx(0.5)


def test_everything_is_written_and_drawn(rows: list[Row], tmp_path: Path) -> None:
    write_csv(rows, tmp_path / "rows.csv")
    save_figure(figure(rows), tmp_path / "figure.png")
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert len(list(csv.DictReader(lines))) == len(rows)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert layer_table(rows, "bounded", FEATURES).row_count == 2
    assert score_table(rows, "bounded").row_count == 2 + 2 * len(FEATURES)


def test_only_softmax_can_be_replaced(tiny_run: Path) -> None:
    with pytest.raises(UserError, match=r"attention=performer_relu .* attention=softmax"):
        load_softmax(tiny_run)


def test_a_model_comes_with_its_data(monkeypatch: pytest.MonkeyPatch, softmax_run: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["propagation", "--model", str(softmax_run)])
    with pytest.raises(UserError, match="--data"):
        main()
