"""Times of checkpoints, and the choice of those that are kept."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protlm.checkpoints.format import all_checkpoints, checkpoint_name, latest, step_of
from protlm.checkpoints.validations import best_checkpoints, read_metrics
from protlm.config import BestMetric
from protlm.training.callbacks import save_checkpoints
from protlm.training.callbacks.monitor import Monitor

Train = Callable[..., Path]


def steps_of(run: Path) -> list[int]:
    return [step_of(path) for path in all_checkpoints(run)]


@pytest.mark.parametrize(("keep", "kept"), [(1, [3, 4]), (2, [3, 4]), (3, [2, 3, 4])])
def test_the_newest_are_kept_and_never_fewer_than_two(
    keep: int, kept: list[int], train_tiny: Train, tmp_path: Path
) -> None:
    settings = ("trainer.checkpoint_every=1", f"trainer.keep_checkpoints={keep}")
    run = train_tiny(tmp_path / "run", *settings)
    names = [checkpoint_name(step) for step in kept]
    expected = {"latest", *names, *(f"{name}.sha256" for name in names)}
    assert {path.name for path in (run / "checkpoints").iterdir()} == expected
    assert steps_of(run) == kept


def test_unfinished_checkpoints_are_removed_at_the_next_start(
    train_tiny: Train, tmp_path: Path
) -> None:
    run = train_tiny(tmp_path / "run", "trainer.max_steps=2")
    (run / "checkpoints" / ".step-00000002.ckpt.99.part").write_bytes(b"half of it")
    train_tiny(run, "trainer.max_steps=3")
    assert not list(run.rglob("*.part"))


@pytest.fixture
def validations(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Sets the result of the validation after each step; loss and accuracy have opposite orders."""
    said: dict[int, float] = {}
    write = Monitor._write

    def write_what_is_said(self: Monitor, trainer: Any, metrics: dict[str, float]) -> None:
        if "valid_loss" in metrics:
            value = said[trainer.global_step]
            metrics |= {"valid_loss": value, "valid_accuracy": 1 - value}
        write(self, trainer, metrics)

    monkeypatch.setattr(Monitor, "_write", write_what_is_said)
    return said


BEST = (
    "trainer.max_steps=10",
    "trainer.checkpoint_every=5",
    "trainer.valid_every=2",
    "trainer.valid_batches=1",
    "trainer.keep_checkpoints=2",
)


@pytest.mark.parametrize("stop", [None, 4, 7])
@pytest.mark.parametrize(
    "metric",
    [BestMetric.valid_loss, pytest.param(BestMetric.valid_accuracy, marks=pytest.mark.slow)],
)
def test_the_best_are_kept_besides_the_newest(
    metric: BestMetric,
    stop: int | None,
    validations: dict[int, float],
    train_tiny: Train,
    tmp_path: Path,
    killed_after: Callable,
) -> None:
    """Steps 4 and 2 are the best, then 8; the run that was killed finds the same."""
    validations |= {2: 0.2, 4: 0.1, 6: 0.9, 8: 0.3, 10: 0.8}
    settings = (*BEST, "trainer.keep_best=2", f"trainer.best_metric={metric}")
    if stop is not None:
        settings = (*settings, "trainer.checkpoint_minutes=1e-9")
        with killed_after(stop):
            train_tiny(tmp_path / "run", *settings)
    run = train_tiny(tmp_path / "run", *settings)
    best = [step_of(path) for path in best_checkpoints(run, metric, 2)]
    assert best == [4, 2]
    newest = [8, 10] if stop is None else [9, 10]
    assert steps_of(run) == sorted({*best, *newest})
    newest_of_all = latest(run)
    assert newest_of_all is not None and step_of(newest_of_all) == 10


def test_the_last_validation_may_be_the_best(
    validations: dict[int, float], train_tiny: Train, tmp_path: Path
) -> None:
    """The previous best is then removed, if it is not among the newest."""
    validations |= {2: 0.2, 4: 0.5, 6: 0.9, 8: 0.3, 10: 0.1}
    run = train_tiny(tmp_path / "run", *BEST, "trainer.keep_best=1")
    assert steps_of(run) == [8, 10]


def test_a_validation_that_is_nan_is_not_the_best(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    rows = ["step,valid_loss", "1,3", "2,nan", "3,1", "4,nan", "5,2"]
    (tmp_path / "metrics.csv").write_text("\n".join([*rows, ""]))
    for step in range(1, 6):
        (tmp_path / "checkpoints" / checkpoint_name(step)).touch()
    best = best_checkpoints(tmp_path, BestMetric.valid_loss, 9)
    assert [step_of(path) for path in best] == [3, 5, 1]


def test_by_default_no_best_is_kept(
    validations: dict[int, float], train_tiny: Train, tmp_path: Path
) -> None:
    validations |= {2: 0.1, 4: 0.2, 6: 0.3, 8: 0.4, 10: 0.5}
    run = train_tiny(tmp_path / "run", *BEST)
    assert steps_of(run) == [5, 10]
    assert len([row for row in read_metrics(run / "metrics.csv") if "valid_loss" in row]) == 5


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A clock that advances by 40 seconds at each reading."""
    now = SimpleNamespace(seconds=0.0)

    def monotonic() -> float:
        now.seconds += 40
        return now.seconds

    monkeypatch.setattr(save_checkpoints, "time", SimpleNamespace(monotonic=monotonic))
    return now


def test_checkpoints_by_time(clock: SimpleNamespace, train_tiny: Train, tmp_path: Path) -> None:
    """A step takes 40 seconds here, so that two minutes pass in three steps."""
    settings = ("trainer.max_steps=8", "trainer.checkpoint_every=100", "trainer.valid_every=100")
    run = train_tiny(tmp_path / "run", *settings, "trainer.keep_checkpoints=9")
    assert steps_of(run) == [8]
    by_time = ("trainer.checkpoint_minutes=2", "trainer.keep_checkpoints=9")
    run = train_tiny(tmp_path / "timed", *settings, *by_time)
    assert steps_of(run) == [3, 6, 8]


def test_the_log_is_as_durable_as_the_checkpoint(
    train_tiny: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows up to a step are synced before its checkpoint is renamed."""
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def noted_sync(descriptor: int) -> None:
        done.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        sync(descriptor)

    def noted_replace(self: Path, target: Path) -> Path:
        done.append(f"name {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    train_tiny(tmp_path / "run", "trainer.log_every=1", "trainer.checkpoint_every=2")
    sync_log, names = "sync metrics.csv", [f"name {checkpoint_name(step)}" for step in (2, 4)]
    found = [event for event in done if event in {sync_log, *names, "name latest"}]
    assert found[:6] == [sync_log, names[0], "name latest", sync_log, names[1], "name latest"]
