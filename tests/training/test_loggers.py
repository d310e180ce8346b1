"""Logs: CSV always, TensorBoard and wandb really run, a failing logger never stops a run."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pytorch_lightning.loggers.logger import DummyLogger

from protlm.training.loggers import CsvFile, Guarded
from protlm.training.metrics import read_metrics


def test_a_continued_log_has_no_gaps_and_no_repeats(tmp_path: Path) -> None:
    first = CsvFile(tmp_path, from_step=0)
    for step in (1, 2, 3):
        first.log_metrics({"train_loss": step / 10}, step)
    second = CsvFile(tmp_path, from_step=2)
    second.log_metrics({"valid_loss": 0.5}, 3)
    assert read_metrics(tmp_path / "metrics.csv") == [
        {"step": 1, "train_loss": 0.1},
        {"step": 2, "train_loss": 0.2},
        {"step": 3, "valid_loss": 0.5},
    ]


def test_a_logger_that_fails_warns_once_and_is_off() -> None:
    calls = []

    def fail() -> DummyLogger:
        calls.append(1)
        raise RuntimeError("no such service")

    logger = Guarded("broken", fail)
    with pytest.warns(UserWarning, match="broken failed and is off: no such service"):
        logger.log_metrics({"train_loss": 1.0}, 1)
    logger.log_metrics({"train_loss": 1.0}, 2)
    logger.finalize("success")
    assert len(calls) == 1


def test_tensorboard_is_written(train_tiny: Callable[..., Path], tmp_path: Path) -> None:
    run = train_tiny(tmp_path / "run", "logger=tensorboard")
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))


def test_wandb_runs_offline(protlm_command: Callable, tiny_data: Path, tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "WANDB_SILENT": "true"}
    done = protlm_command(
        "train",
        "model=tiny",
        f"data.dir={tiny_data}",
        "run_dir=run",
        "data.max_length=128",
        "data.tokens_per_batch=1024",
        "schedule.warmup_steps=1",
        "trainer.max_steps=2",
        "trainer.log_every=1",
        "trainer.accelerator=cpu",
        "logger=wandb",
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "wandb failed" not in done.stderr
    logged = list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))
    assert len(logged) == 1 and logged[0].stat().st_size > 0
    assert read_metrics(tmp_path / "run" / "metrics.csv")
