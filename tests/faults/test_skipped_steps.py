"""A loss or gradient that is not finite, or a spike: the step is skipped and its samples listed."""

import json
import math
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protlm.build import open_data
from protlm.checkpoints.format import all_checkpoints, checkpoint_name, load_training
from protlm.checkpoints.validations import read_metrics
from protlm.config import TrainConfig
from protlm.config.composition import compose, read_run_config
from protlm.model.objective import TargetSums
from protlm.system.errors import TrainingDivergedError
from protlm.training import module
from protlm.training.callbacks import skipped_steps
from protlm.training.callbacks.skipped_steps import BAD_BATCHES
from protlm.training.module import LanguageModeling
from tests.fixtures.calls import looked_at
from tests.fixtures.ranks import assert_same_run, go_back
from tests.marks import slow_but

# What a step changes: the weights, the state of the optimizer, the schedule and the average.
LEARNED = ("state_dict.", "optimizer_states.", "lr_schedulers.", "average.")
LEARNED += ("callbacks.AverageWeights.",)
PLAIN = ("trainer.checkpoint_every=1", "trainer.keep_checkpoints=100", "trainer.ema_decay=0.9")
SETTINGS = (*PLAIN, "schedule=cosine", "schedule.warmup_steps=2")


@pytest.fixture
def spoil(monkeypatch) -> Callable[..., list[list[int]]]:
    """Makes the logits of these batches NaN, or multiplies their loss; returns their samples."""

    def patch(*numbers: int, factor: float = math.nan) -> list[list[int]]:
        work, samples = LanguageModeling.training_step, []

        def training_step(self: LanguageModeling, batch: Any, index: int) -> Any:
            if index not in numbers:
                return work(self, batch, index)
            samples.append(batch.samples_B.tolist())
            weight = self.network.head.bias
            kept = weight.data.clone()
            if math.isnan(factor):
                weight.data.fill_(math.nan)
            out = work(self, batch, index)
            weight.data.copy_(kept)
            return out if math.isnan(factor) else out | {"loss": out["loss"] * factor}

        monkeypatch.setattr(LanguageModeling, "training_step", training_step)
        return samples

    return patch


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / BAD_BATCHES).read_text().splitlines()]


def accessions(data: Path, numbers: list[int]) -> list[str]:
    train_split, _ = open_data(compose(TrainConfig, [f"data.dir={data}", "run_dir=x"]).data)
    return [train_split.identifier(number) for number in numbers]


def losses(run: Path) -> list[float]:
    return [row["train_loss"] for row in read_metrics(run / "metrics.csv") if "train_loss" in row]


@pytest.fixture
def learned_at(state_of) -> Callable[..., list[dict[str, Any]]]:
    """Returns what the checkpoints of these steps have learned."""

    def states(run: Path, *steps: int) -> list[dict[str, Any]]:
        found = [state_of(run / "checkpoints" / checkpoint_name(step)) for step in steps]
        return [
            {key: value for key, value in state.items() if key.startswith(LEARNED)}
            for state in found
        ]

    return states


@pytest.mark.parametrize("accumulate", slow_but([1, 2], 1))
def test_a_step_with_a_nan_loss_is_skipped(
    accumulate, spoil, train, tiny_data, state_of, learned_at
):
    """One NaN among accumulated batches skips the step; only that batch's samples are listed."""
    samples = spoil(3 * accumulate - 1)
    settings = (*SETTINGS, f"trainer.accumulate_grad_batches={accumulate}")
    with pytest.warns(UserWarning, match="step 3 was skipped: the loss is not finite"):
        run = train("run", *settings)
    (line,) = lines(run)
    assert (line["step"], line["accessions"]) == (3, accessions(tiny_data, samples[0]))
    second, third, fourth = learned_at(run, 2, 3, 4)
    assert second == third != fourth
    # The data are consumed nevertheless.
    places = [state_of(path)["SequenceData.samples"] for path in all_checkpoints(run)[1:]]
    assert places == sorted(set(places)) and line["samples"] == places[1]


def test_all_samples_of_a_joined_row_are_listed(spoil, train):
    spoil(1)
    settings = ("data.mode=concatenated", "data.max_length=1024", "data.num_workers=0")
    with pytest.warns(UserWarning, match="step 2 was skipped"):
        run = train("run", *settings, "trainer.max_steps=3")
    (line,) = lines(run)
    # A batch is one row; the place of a sequence that is cut counts what is before it alone.
    config = read_run_config(run / "config.yaml")
    data, _ = open_data(compose(TrainConfig, [f"data.dir={config['data']['dir']}"]).data)
    order = data.order(seed=config["seed"]).draw(0, np.arange(len(data))).samples
    ends = np.cumsum(data.lengths_of(order) + 1)
    drawn = order[(ends > 1023) & (ends - data.lengths_of(order) - 1 < 2046)]
    assert line["accessions"] == [data.identifier(int(number)) for number in drawn]
    assert len(drawn) > 1


@pytest.mark.slow
def test_skipped_steps_are_not_in_the_mean_loss(spoil, train):
    clean = train("clean", "trainer.log_every=1")
    spoil(2)
    with pytest.warns(UserWarning, match="step 3 was skipped"):
        run = train("run", "trainer.log_every=2")
    assert losses(run)[1] == pytest.approx(losses(clean)[3], rel=0.1)
    with pytest.warns(UserWarning, match="step 3 was skipped"):
        alone = train("alone", "trainer.log_every=1")
    assert [math.isnan(loss) for loss in losses(alone)] == [False, False, True, False]


def test_a_step_with_an_infinite_loss_and_a_finite_gradient_is_skipped(train, monkeypatch):
    """Such as the loss of a target whose probability is 0."""
    sums_of = module.target_sums
    calls = []

    def infinite(*inputs: Any) -> TargetSums:
        sums = sums_of(*inputs)
        calls.append(1)
        return replace(sums, nats=sums.nats + math.inf) if len(calls) == 2 else sums

    monkeypatch.setattr(module, "target_sums", infinite)
    with pytest.warns(UserWarning, match="step 2 was skipped: the loss is not finite"):
        run = train("run")
    (line,) = lines(run)
    assert line["gradient_norm"] is not None


def test_a_step_with_an_infinite_gradient_is_skipped(spoil, train, learned_at):
    """The loss is finite, so all samples of the step are listed."""
    spoil(1, factor=1e38)
    with pytest.warns(UserWarning, match="step 2 was skipped: the gradient is not finite"):
        run = train("run", *SETTINGS)
    (line,) = lines(run)
    assert line["gradient_norm"] is None and len(line["accessions"]) >= 8
    first, second = learned_at(run, 1, 2)
    assert first == second


@pytest.mark.slow
def test_a_spike_is_skipped_and_its_window_is_in_the_checkpoint(
    spoil, train_tiny, tmp_path, learned_at, monkeypatch
):
    monkeypatch.setattr(skipped_steps, "WINDOW", 4)
    # Before there are four norms a spike is not known for one.
    spoil(1, 6, factor=1000.0)
    settings = (*PLAIN, "trainer.max_gradient_norm_ratio=5", "trainer.max_steps=8")
    with pytest.warns(UserWarning, match="step 7 was skipped: the gradient norm is .* is usual"):
        whole = train_tiny(tmp_path / "whole", *settings)
    assert [line["step"] for line in lines(whole)] == [7]
    sixth, seventh, eighth = learned_at(whole, 6, 7, 8)
    assert sixth == seventh != eighth
    run = train_tiny(tmp_path / "run", *settings, "trainer.max_steps=6")
    with pytest.warns(UserWarning, match="step 7 was skipped"):
        train_tiny(run, *settings)
    assert learned_at(run, 8) == [eighth]


@pytest.mark.slow
def test_a_run_with_skipped_steps_resumes_exactly(spoil, train_tiny, tmp_path):
    spoil(1, 4)
    settings = (*SETTINGS, "trainer.max_steps=7", "trainer.log_every=1", "model.dropout=0.2")
    # As a run that is killed after step 6 and resumes from step 3.
    with pytest.warns(UserWarning, match="was skipped"):
        whole = train_tiny(tmp_path / "whole", *settings)
    run = shutil.copytree(whole, tmp_path / "run")
    go_back(run, 3)
    with pytest.warns(UserWarning, match="step 5 was skipped"):
        train_tiny(run, *settings)
    assert_same_run(run, whole)
    assert [line["step"] for line in lines(run)] == [2, 5]
    assert lines(run) == lines(whole)


def test_too_many_skipped_steps_in_a_row_end_the_run(spoil, train, tmp_path):
    spoil(1, 3, 4, 5)
    settings = ("trainer.max_bad_steps=3", "trainer.max_steps=9", "trainer.checkpoint_every=2")
    with (
        pytest.warns(UserWarning, match="was skipped"),
        pytest.raises(TrainingDivergedError, match="3 steps in a row were skipped") as ended,
    ):
        train("run", *settings)
    assert ended.value.exit_code == 1
    assert "max_gradient_norm_ratio" not in str(ended.value)
    newest = tmp_path / "run" / "checkpoints" / checkpoint_name(4)
    assert f"the last good checkpoint is {newest}" in str(ended.value)
    state = load_training(newest)["state_dict"]
    assert all(value.isfinite().all() for value in state.values())
    assert [line["step"] for line in lines(tmp_path / "run")] == [2, 4, 5, 6]


def test_skipped_steps_before_and_after_a_resume_are_in_a_row(spoil, train):
    """A run that diverged ends although it is requeued."""
    spoil(1, 2, 3)
    settings = ("trainer.max_bad_steps=3",)
    with pytest.warns(UserWarning, match="was skipped"):
        train("run", *settings, "trainer.max_steps=3")
    with (
        pytest.warns(UserWarning, match="step 4 was skipped"),
        pytest.raises(TrainingDivergedError, match="3 steps in a row"),
    ):
        train("run", *settings, "trainer.max_steps=9")


def test_the_run_continues_if_the_list_cannot_be_written(spoil, train_tiny, tmp_path):
    spoil(2)

    def refuse(path: Path, *rest: Any, **named: Any) -> None:
        if path.name == BAD_BATCHES:
            raise PermissionError(13, "Permission denied")

    with looked_at(Path, "open", refuse), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train_tiny(tmp_path / "run")
    said = [str(warning.message) for warning in told]
    assert any("bad_batches.jsonl cannot be written: Permission denied" in text for text in said)


@pytest.mark.slow
def test_a_nan_on_one_rank_skips_a_step_on_both(run_ranks, train, tmp_path, tiny_data, learned_at):
    _, samples = run_ranks(tmp_path, "nan-on-rank-1")
    run = tmp_path / "run"
    second, third, fourth = learned_at(run, 2, 3, 4)
    assert second == third != fourth
    (line,) = lines(run)
    assert line["accessions"] == accessions(tiny_data, samples)
    for rank in (0, 1):
        assert ("step 3 was skipped" in (tmp_path / f"rank-{rank}.log").read_text()) == (rank == 0)
    assert len(losses(run)) == 5 and all(map(math.isfinite, losses(run)))
    # The loss of the first step is that of one rank.
    one = train("one", "trainer.log_every=1")
    assert losses(run)[0] == pytest.approx(losses(one)[0], rel=1e-5)
