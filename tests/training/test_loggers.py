"""Loggers: CSV, TensorBoard and wandb; a failing logger never stops a run."""

from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest
from pytorch_lightning.loggers.logger import DummyLogger

from protlm.checkpoints.validations import read_metrics
from protlm.config import LoggerConfig, WandbMode
from protlm.training.loggers import COLUMNS, CsvFile, Guarded, make_loggers


def test_a_resumed_log_has_no_gaps_and_no_repeats(tmp_path: Path) -> None:
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


def test_a_truncated_row_affects_neither_the_next_nor_a_resumed_run(tmp_path: Path) -> None:
    """The disk was full in the middle of a row, and had space again for the next one."""
    log = CsvFile(tmp_path, from_step=0)
    log.log_metrics({"train_loss": 0.1}, 1)
    # As written by versions that did not truncate the row, and as after a flipped bit.
    with log.path.open("a") as file:
        file.write("2,0,8,2.5")
    log.log_metrics({"train_loss": 0.3}, 3)
    with log.path.open("a") as file:
        file.write("4,0\n5" + "," * (len(COLUMNS) - 1) + "x\n")
    assert read_metrics(tmp_path / "metrics.csv") == [{"step": 1, "train_loss": 0.1}]
    CsvFile(tmp_path, from_step=5).log_metrics({"train_loss": 0.6}, 6)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.csv")] == [1, 6]


def test_a_full_disk_leaves_no_truncated_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CsvFile(tmp_path, from_step=0)
    log.log_metrics({"train_loss": 0.1}, 1)

    class Full:
        def __init__(self, file: TextIO, columns: object) -> None:
            self.file = file

        def writerow(self, row: object) -> None:
            self.file.write("2,0,8,2.5")
            self.file.flush()
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="No space left"):
        patch.setattr("csv.DictWriter", Full)
        log.log_metrics({"train_loss": 0.2}, 2)
    log.log_metrics({"train_loss": 0.3}, 3)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.csv")] == [1, 3]


def test_a_log_with_other_columns_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train_loss,of_an_older_version\n1,0.1,7\n")
    CsvFile(tmp_path, from_step=1).log_metrics({"train_loss": 0.2}, 2)
    rows = read_metrics(tmp_path / "metrics.csv")
    assert rows == [{"step": 1, "train_loss": 0.1}, {"step": 2, "train_loss": 0.2}]


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


def test_a_resumed_run_hides_the_repeated_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LoggerConfig(tensorboard=True)
    for from_step, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        _, tensorboard = make_loggers(config, tmp_path, from_step=from_step)
        for step in steps:
            tensorboard.log_metrics({"train_loss": from_step + step / 10}, step)
        tensorboard.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, round(event.value, 3)) for event in events.Scalars("train_loss")]
    assert found == [(1, 0.1), (2, 1.2), (3, 1.3)]


def test_a_resumed_run_keeps_its_wandb_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(
        "pytorch_lightning.loggers.WandbLogger", lambda **named: told.append(named) or DummyLogger()
    )
    for folder in ("run", "run", "another"):
        (tmp_path / folder).mkdir(exist_ok=True)
        loggers = make_loggers(LoggerConfig(wandb=WandbMode.online), tmp_path / folder, from_step=0)
        loggers[1].log_metrics({"train_loss": 0.1}, 1)
    first, second, other = (named["id"] for named in told)
    assert first == second != other
    assert all(named["resume"] == "allow" for named in told)


@pytest.mark.slow
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
