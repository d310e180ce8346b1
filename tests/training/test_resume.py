"""A run that was interrupted ends as the uninterrupted one, bit for bit."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from protlm.errors import ExitCode, UserError
from protlm.model.checkpoint import latest, load_training
from protlm.training.callbacks import StopOnSignal
from protlm.training.loggers import read_metrics

STEPS = 12
# 150 sequences in batches of 1,024 tokens are about 17 batches: with accumulation the run crosses
# the end of an epoch.
HARD = (
    "attention=performer_softmax",
    "attention.num_features=32",
    "attention.redraw_every=3",
    # With them 32 features do for an estimate, and the run does not warn.
    "model.qk_norm=true",
    "model.dropout=0.3",
    "data.crop=random",
    "trainer.accumulate=2",
    "trainer.activation_checkpointing=true",
    "trainer.valid_every=4",
    # Stops fall between two rows of the log.
    "trainer.log_every=4",
    "schedule=cosine",
    "schedule.warmup_steps=2",
    f"trainer.max_steps={STEPS}",
)
TIMED = {"samples_per_second", "residues_per_second"}


def final_state(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = load_training(run / "checkpoints" / f"step-{STEPS:08d}.ckpt")
    state = {f"weights.{name}": value for name, value in checkpoint["state_dict"].items()}
    for number, values in checkpoint["optimizer_states"][0]["state"].items():
        state |= {f"optimizer.{number}.{name}": value for name, value in values.items()}
    return state


def log(run: Path) -> list[dict[str, float]]:
    rows = read_metrics(run / "metrics.csv")
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(
    train_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "whole", *HARD)


@pytest.mark.parametrize("stop", [1, 4, 5, 11])
def test_stop_and_go_is_bitwise(
    stop: int,
    uninterrupted: Path,
    train_tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_note = StopOnSignal.on_train_batch_end

    def interrupt(self: StopOnSignal, trainer, *rest: object) -> None:
        if trainer.global_step == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        take_note(self, trainer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(StopOnSignal, "on_train_batch_end", interrupt)
        with pytest.raises(SystemExit) as stopped:
            train_tiny(tmp_path / "run", *HARD)
    assert stopped.value.code == ExitCode.PREEMPTED
    newest = latest(tmp_path / "run")
    assert newest is not None and newest.name == f"step-{stop:08d}.ckpt"

    train_tiny(tmp_path / "run", *HARD)

    whole, continued = final_state(uninterrupted), final_state(tmp_path / "run")
    assert whole.keys() == continued.keys()
    for name, value in whole.items():
        assert torch.equal(value, continued[name]), name
    assert log(tmp_path / "run") == log(uninterrupted)


def test_the_run_crosses_an_epoch(uninterrupted: Path) -> None:
    assert max(row.get("epoch", 0) for row in log(uninterrupted)) >= 1


def test_a_complete_run_stays_as_it_is(
    uninterrupted: Path, train_tiny: Callable[..., Path]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*.ckpt")}
    train_tiny(uninterrupted, *HARD)
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*.ckpt")} == before


def test_settings_that_are_newer_than_a_run_have_their_defaults(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    run = train_tiny(tmp_path / "run", "trainer.max_steps=2")
    config = run / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    older = [line for line in lines if not line.strip().startswith("reversible:")]
    assert len(older) == len(lines) - 1
    config.write_text("".join(older))
    newest = latest(train_tiny(run, "trainer.max_steps=3"))
    assert newest is not None and newest.name == "step-00000003.ckpt"
    with pytest.raises(UserError, match=r"model\.reversible=False, not True"):
        train_tiny(run, "model.reversible=true", "trainer.max_steps=4")


def test_workers_do_not_change_a_run(
    uninterrupted: Path, train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    train_tiny(tmp_path / "run", *HARD, "data.num_workers=1")
    for name, value in final_state(tmp_path / "run").items():
        assert torch.equal(value, final_state(uninterrupted)[name]), name


def test_two_ranks_see_the_same_samples_and_learn_the_same(
    protlm_command: Callable, train_tiny: Callable[..., Path], tiny_data: Path, tmp_path: Path
) -> None:
    settings = (
        "attention=performer_softmax",
        "attention.redraw_every=2",
        "model.qk_norm=true",
        "trainer.log_every=1",
    )
    one = train_tiny(tmp_path / "one", *settings)
    two = protlm_command(
        "train",
        "model=tiny",
        f"data.dir={tiny_data}",
        f"run_dir={tmp_path / 'two'}",
        "data.max_length=128",
        "data.tokens_per_batch=1024",
        "schedule.warmup_steps=1",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "trainer.max_steps=4",
        *settings,
        cwd=tmp_path,
    )
    assert two.returncode == 0, two.stderr
    logs = log(one), log(tmp_path / "two")
    rows_one, rows_two = ([row for row in rows if "train_loss" in row] for rows in logs)
    assert [row["samples"] for row in rows_one] == [row["samples"] for row in rows_two]
    for row_one, row_two in zip(rows_one, rows_two, strict=True):
        assert row_two["train_loss"] == pytest.approx(row_one["train_loss"], abs=1e-4)
        assert row_two["gradient_norm"] == pytest.approx(row_one["gradient_norm"], rel=1e-3)
    seen_one, seen_two = ([row for row in rows if "square_norm_layer_1" in row] for rows in logs)
    assert len(seen_one) == 4
    for row_one, row_two in zip(seen_one, seen_two, strict=True):
        assert row_two == pytest.approx(row_one, rel=1e-4)
