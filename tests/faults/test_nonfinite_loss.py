"""A loss that is not finite: the step is skipped on all ranks, and its samples are listed."""

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protlm.build import open_data
from protlm.checkpoints.format import load_training
from protlm.checkpoints.validations import read_metrics
from protlm.config import TrainConfig
from protlm.config.composition import compose, read_run_config
from protlm.model.objective import TargetSums
from protlm.system.errors import TrainingDivergedError
from protlm.training import module
from protlm.training.callbacks.skipped_steps import BAD_BATCHES
from protlm.training.module import LanguageModeling

PROGRAM = Path(__file__).parent / "programs" / "nan_on_one_rank.py"
Train = Callable[..., Path]
Read = Callable[[Path], Any]
# What a step changes: the weights, the state of the optimizer, the schedule and the average.
LEARNED = ("state_dict.", "optimizer_states.", "lr_schedulers.", "average.")


@pytest.fixture
def spoil_logits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[int]]]:
    """Makes the logits of these batches NaN; returns their samples."""

    def patch(*numbers: int) -> list[list[int]]:
        work, samples = LanguageModeling.training_step, []

        def training_step(self: LanguageModeling, batch: Any, index: int) -> Any:
            if index not in numbers:
                return work(self, batch, index)
            samples.append(batch.samples_B.tolist())
            weight = self.network.head.bias
            kept = weight.data.clone()
            weight.data.fill_(math.nan)
            out = work(self, batch, index)
            weight.data.copy_(kept)
            return out

        monkeypatch.setattr(LanguageModeling, "training_step", training_step)
        return samples

    return patch


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / BAD_BATCHES).read_text().splitlines()]


def learned(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key.startswith(LEARNED)}


SETTINGS = (
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=100",
    "trainer.ema_decay=0.9",
    "schedule=cosine",
    "schedule.warmup_steps=2",
)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_with_a_nan_loss_is_skipped(
    accumulate: int,
    spoil_logits: Callable,
    train_tiny: Train,
    tiny_data: Path,
    tmp_path: Path,
    state_of: Read,
) -> None:
    """One NaN among accumulated batches skips the step; only that batch's samples are listed."""
    samples = spoil_logits(3 * accumulate - 1)
    settings = (*SETTINGS, f"trainer.accumulate_grad_batches={accumulate}")
    with pytest.warns(UserWarning, match="step 3 was skipped: the loss is not finite"):
        run = train_tiny(tmp_path / "run", *settings)
    config = compose(TrainConfig, [f"data.dir={tiny_data}", "run_dir=x"])
    accessions = [open_data(config.data)[0].identifier(number) for number in samples[0]]
    (line,) = lines(run)
    assert (line["step"], line["accessions"]) == (3, accessions)
    states = [state_of(run / "checkpoints" / f"step-{n:08d}.ckpt") for n in (2, 3, 4)]
    assert learned(states[0]) == learned(states[1])
    assert learned(states[1]) != learned(states[2])
    # The data are consumed nevertheless.
    places = [state["SequenceData.samples"] for state in states]
    assert places == sorted(set(places)) and line["samples"] == places[1]


def test_all_samples_of_a_joined_row_are_listed(
    spoil_logits: Callable, train_tiny: Train, tmp_path: Path
) -> None:
    spoil_logits(1)
    settings = ("data.mode=concatenated", "data.max_length=1024", "data.num_workers=0")
    with pytest.warns(UserWarning, match="step 2 was skipped"):
        run = train_tiny(tmp_path / "run", *settings, "trainer.max_steps=3")
    (line,) = lines(run)
    # A batch is one row; the place of a sequence that is cut counts what is before it alone.
    config = read_run_config(run / "config.yaml")
    data, _ = open_data(compose(TrainConfig, [f"data.dir={config['data']['dir']}"]).data)
    order = data.order(seed=config["seed"]).draw(0, np.arange(len(data))).samples
    ends = np.cumsum(data.lengths_of(order) + 1)
    drawn = order[(ends > 1023) & (ends - data.lengths_of(order) - 1 < 2046)]
    assert line["accessions"] == [data.identifier(int(number)) for number in drawn]
    assert len(drawn) > 1


def test_skipped_steps_are_not_in_the_mean_loss(
    spoil_logits: Callable, train_tiny: Train, tmp_path: Path
) -> None:
    clean = train_tiny(tmp_path / "clean", "trainer.log_every=1")
    spoil_logits(2)
    with pytest.warns(UserWarning, match="step 3 was skipped"):
        run = train_tiny(tmp_path / "run", "trainer.log_every=2")

    def losses(run: Path) -> list[float]:
        rows = read_metrics(run / "metrics.csv")
        return [row["train_loss"] for row in rows if "train_loss" in row]

    assert losses(run)[1] == pytest.approx(losses(clean)[3], rel=0.1)
    with pytest.warns(UserWarning, match="step 3 was skipped"):
        alone = train_tiny(tmp_path / "alone", "trainer.log_every=1")
    assert [math.isnan(loss) for loss in losses(alone)] == [False, False, True, False]


def test_a_step_with_an_infinite_loss_and_a_finite_gradient_is_skipped(
    train_tiny: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the loss of a target whose probability is 0."""
    sums_of = module.target_sums
    calls = []

    def infinite(*inputs: Any) -> TargetSums:
        sums = sums_of(*inputs)
        calls.append(1)
        return replace(sums, nats=sums.nats + math.inf) if len(calls) == 2 else sums

    monkeypatch.setattr(module, "target_sums", infinite)
    with pytest.warns(UserWarning, match="step 2 was skipped: the loss is not finite"):
        run = train_tiny(tmp_path / "run")
    (line,) = lines(run)
    assert line["gradient_norm"] is not None


def test_a_run_with_skipped_steps_resumes_exactly(
    spoil_logits: Callable, train_tiny: Train, tmp_path: Path, state_of: Read, log_of: Read
) -> None:
    spoil_logits(1, 4)
    settings = (*SETTINGS, "trainer.max_steps=7", "trainer.log_every=1", "model.dropout=0.2")
    with pytest.warns(UserWarning, match="was skipped"):
        whole = train_tiny(tmp_path / "whole", *settings)
    # As a run that is killed after step 6 and resumes from step 3.
    with pytest.warns(UserWarning, match="was skipped"):
        run = train_tiny(tmp_path / "run", *settings)
    for step in (4, 5, 6, 7):
        (run / "checkpoints" / f"step-{step:08d}.ckpt").unlink()
    (run / "checkpoints" / "latest").write_text("step-00000003.ckpt\n")
    with pytest.warns(UserWarning, match="step 5 was skipped"):
        train_tiny(run, *settings)
    names = [f"step-{n:08d}.ckpt" for n in (4, 5, 6, 7)]
    for name in names:
        assert state_of(run / "checkpoints" / name) == state_of(whole / "checkpoints" / name), name
    assert repr(log_of(run)) == repr(log_of(whole))
    assert [line["step"] for line in lines(run)] == [2, 5]
    assert lines(run) == lines(whole)


def test_too_many_skipped_steps_in_a_row_end_the_run(
    spoil_logits: Callable, train_tiny: Train, tmp_path: Path
) -> None:
    spoil_logits(1, 3, 4, 5)
    with (
        pytest.warns(UserWarning, match="was skipped"),
        pytest.raises(TrainingDivergedError, match="3 steps in a row were skipped") as ended,
    ):
        train_tiny(
            tmp_path / "run",
            "trainer.max_bad_steps=3",
            "trainer.max_steps=9",
            "trainer.checkpoint_every=2",
        )
    assert ended.value.exit_code == 1
    assert "max_gradient_norm_ratio" not in str(ended.value)
    newest = tmp_path / "run" / "checkpoints" / "step-00000004.ckpt"
    assert f"the last good checkpoint is {newest}" in str(ended.value)
    state = load_training(newest)["state_dict"]
    assert all(value.isfinite().all() for value in state.values())
    assert [line["step"] for line in lines(tmp_path / "run")] == [2, 4, 5, 6]


def test_skipped_steps_before_and_after_a_resume_are_in_a_row(
    spoil_logits: Callable, train_tiny: Train, tmp_path: Path
) -> None:
    """A run that diverged ends although it is requeued."""
    spoil_logits(1, 2, 3)
    settings = ("trainer.max_bad_steps=3",)
    with pytest.warns(UserWarning, match="was skipped"):
        train_tiny(tmp_path / "run", *settings, "trainer.max_steps=3")
    with (
        pytest.warns(UserWarning, match="step 4 was skipped"),
        pytest.raises(TrainingDivergedError, match="3 steps in a row"),
    ):
        train_tiny(tmp_path / "run", *settings, "trainer.max_steps=9")


def test_the_run_continues_if_the_list_cannot_be_written(
    spoil_logits: Callable, train_tiny: Train, tmp_path: Path
) -> None:
    spoil_logits(2)
    original = Path.open

    def refuse(self: Path, *rest: Any, **named: Any) -> Any:
        if self.name == BAD_BATCHES:
            raise PermissionError(13, "Permission denied")
        return original(self, *rest, **named)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(Path, "open", refuse)
        train_tiny(tmp_path / "run")
    said = [str(warning.message) for warning in told]
    assert any("bad_batches.jsonl cannot be written: Permission denied" in text for text in said)


def test_a_run_resumes_if_the_list_cannot_be_shortened(
    spoil_logits: Callable, train_tiny: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a full disk lose the list."""
    spoil_logits(2)
    with pytest.warns(UserWarning, match="was skipped"):
        run = train_tiny(tmp_path / "run")
    with (run / BAD_BATCHES).open("a") as file:
        file.write('{"step": 99}\n')
    before, write = lines(run), Path.write_text

    def refuse(self: Path, text: str, *rest: Any, **named: Any) -> int:
        if BAD_BATCHES in self.name:
            write(self, text[:5])
            raise OSError(28, "No space left on device")
        return write(self, text, *rest, **named)

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.warns(UserWarning, match="bad_batches.jsonl.*no space left"):
        train_tiny(run, "trainer.max_steps=5")
    assert lines(run) == before


@pytest.mark.slow
def test_a_nan_on_one_rank_skips_the_step_on_both(
    run_ranks: Callable, train_tiny: Train, tmp_path: Path, tiny_data: Path, state_of: Read
) -> None:
    _, printed = run_ranks(tmp_path, PROGRAM)
    run = tmp_path / "run"
    states = [state_of(run / "checkpoints" / f"step-{n:08d}.ckpt") for n in (2, 3, 4)]
    assert learned(states[0]) == learned(states[1]) != learned(states[2])
    config = compose(TrainConfig, [f"data.dir={tiny_data}", "run_dir=x"])
    train_split, _ = open_data(config.data)
    (line,) = lines(run)
    assert line["accessions"] == [train_split.identifier(n) for n in json.loads(printed)]
    for rank in (0, 1):
        assert ("step 3 was skipped" in (tmp_path / f"rank-{rank}.log").read_text()) == (rank == 0)
    rows = read_metrics(run / "metrics.csv")
    losses = [row["train_loss"] for row in rows if "train_loss" in row]
    assert len(losses) == 5 and all(map(math.isfinite, losses))
    # The loss of the first step is that of one rank.
    one = read_metrics(train_tiny(tmp_path / "one", "trainer.log_every=1") / "metrics.csv")
    expected = next(row["train_loss"] for row in one if "train_loss" in row)
    assert losses[0] == pytest.approx(expected, rel=1e-5)
