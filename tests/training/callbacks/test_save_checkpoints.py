"""Times of checkpoints, which of them are kept, and the history and the average of the weights."""

import os
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from protlm.checkpoints.format import AVERAGE, checkpoint_name, step_of, weights_hash
from protlm.checkpoints.validations import best_checkpoints
from protlm.commands.checkpoint import export
from protlm.config import BestMetric
from protlm.loading import load_model
from protlm.training.callbacks import monitor, save_checkpoints
from protlm.training.callbacks.save_checkpoints import COLUMNS, HISTORY, WriteHistory
from protlm.training.module import LanguageModeling
from tests.fixtures.commands import read_table
from tests.fixtures.runs import Train, rows_of, saved, steps_of, weights_of


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "kept"), [(1, [3, 4]), (2, [3, 4]), (3, [2, 3, 4])])
def test_the_newest_are_kept_and_never_fewer_than_two(keep, kept, train):
    settings = ("trainer.checkpoint_every=1", f"trainer.keep_checkpoints={keep}")
    run = train("run", *settings)
    names = [checkpoint_name(step) for step in kept]
    expected = {"latest", *names, *(f"{name}.sha256" for name in names)}
    assert {path.name for path in (run / "checkpoints").iterdir()} == expected
    assert steps_of(run) == kept
    # One that was not finished is removed at the next start.
    (run / "checkpoints" / ".step-00000004.ckpt.99.part").write_bytes(b"half of it")
    train(run, *settings, "trainer.max_steps=5")
    assert not list(run.rglob("*.part"))


@pytest.fixture
def validations(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Sets the result of the validation after each step; loss and accuracy have opposite orders."""
    said: dict[int, float] = {}
    write = monitor.log

    def write_what_is_said(trainer: Any, metrics: dict[str, float]) -> None:
        if "valid_loss" in metrics:
            value = said[trainer.global_step]
            metrics |= {"valid_loss": value, "valid_accuracy": 1 - value}
        write(trainer, metrics)

    monkeypatch.setattr(monitor, "log", write_what_is_said)
    return said


BEST = ("trainer.max_steps=10", "trainer.checkpoint_every=5", "trainer.valid_every=2")
BEST += ("trainer.valid_batches=1", "trainer.keep_checkpoints=2")


@pytest.mark.slow
@pytest.mark.parametrize("stop", [None, 4, 7])
@pytest.mark.parametrize("metric", [BestMetric.valid_loss, BestMetric.valid_accuracy])
def test_the_best_are_kept_besides_the_newest(metric, stop, validations, train, killed_after):
    """Steps 4 and 2 are the best, then 8; the run that was killed finds the same."""
    validations |= {2: 0.2, 4: 0.1, 6: 0.9, 8: 0.3, 10: 0.8}
    settings = (*BEST, "trainer.keep_best=2", f"trainer.best_metric={metric}")
    if stop is not None:
        settings = (*settings, "trainer.checkpoint_minutes=1e-9")
        with killed_after(stop):
            train("run", *settings)
    run = train("run", *settings)
    best = [step_of(path) for path in best_checkpoints(run, metric, 2)]
    assert best == [4, 2]
    newest = [8, 10] if stop is None else [9, 10]
    assert steps_of(run) == sorted({*best, *newest})
    assert (run / "checkpoints" / "latest").read_text().strip() == checkpoint_name(10)


@pytest.mark.parametrize(
    "losses, keep, kept",
    [
        # By the log of the last checkpoint, 6 is the best, and neither 2 nor 4.
        ([0.3, 0.2, 0.1, 0.5, 0.4], ["trainer.keep_best=1"], [6, 8, 10]),
        # The last is the best, but a run that is killed continues from its checkpoint, by whose
        # log the best is the one before.
        ([0.2, 0.5, 0.9, 0.3, 0.1], ["trainer.keep_best=1"], [2, 8, 10]),
        # By default no best is kept.
        ([0.1, 0.2, 0.3, 0.4, 0.5], [], [5, 10]),
    ],
)
def test_nothing_else_is_kept(losses, keep, kept, validations, train):
    validations |= zip(range(2, 11, 2), losses, strict=True)
    run = train("run", *BEST, *keep)
    assert steps_of(run) == kept
    assert len(rows_of(run, "valid_loss")) == 5


def test_a_validation_that_is_nan_is_not_the_best(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    rows = ["step,valid_loss", "1,3", "2,nan", "3,1", "4,nan", "5,2"]
    (tmp_path / "metrics.csv").write_text("\n".join([*rows, ""]))
    for step in range(1, 6):
        (tmp_path / "checkpoints" / checkpoint_name(step)).touch()
    best = best_checkpoints(tmp_path, BestMetric.valid_loss, 9)
    assert [step_of(path) for path in best] == [3, 5, 1]


@pytest.mark.slow
def test_checkpoints_by_time(train, monkeypatch):
    """A step takes 40 seconds here, so that two minutes pass in three steps."""
    clock = SimpleNamespace(monotonic=count(40, 40).__next__)
    monkeypatch.setattr(save_checkpoints, "time", clock)
    settings = ("trainer.max_steps=8", "trainer.checkpoint_every=100", "trainer.valid_every=100")
    run = train("run", *settings, "trainer.keep_checkpoints=9")
    assert steps_of(run) == [8]
    by_time = ("trainer.checkpoint_minutes=2", "trainer.keep_checkpoints=9")
    run = train("timed", *settings, *by_time)
    assert steps_of(run) == [3, 6, 8]


def test_the_log_is_as_durable_as_the_checkpoint(train, look_at):
    """The rows up to a step are synced before its checkpoint is renamed."""
    done: list[str] = []
    descriptors = Path("/proc/self/fd")
    look_at(os, "fsync", lambda n: done.append(f"sync {(descriptors / str(n)).readlink().name}"))
    look_at(Path, "replace", lambda _, target: done.append(f"name {target.name}"))
    train("run", "trainer.log_every=1", "trainer.checkpoint_every=2")
    sync_log, names = "sync metrics.csv", [f"name {checkpoint_name(step)}" for step in (2, 4)]
    found = [event for event in done if event in {sync_log, *names, "name latest"}]
    assert found[:6] == [sync_log, names[0], "name latest", sync_log, names[1], "name latest"]


def trainer(step: int, is_first: bool = True) -> Any:
    return SimpleNamespace(global_step=step, is_global_zero=is_first)


def module(network: nn.Module) -> Any:
    return nn.ModuleDict({"network": network})


def test_a_row_for_each_start_and_checkpoint(tmp_path):
    network = module(nn.Linear(3, 2))
    history = WriteHistory(tmp_path)
    history.on_train_start(trainer(0), network)
    network["network"].weight.data += 1
    history.on_save_checkpoint(trainer(7), network, {})
    # A truncated row does not affect the next.
    with (tmp_path / HISTORY).open("a") as file:
        file.write("2026-01-01\tsa")
    WriteHistory(tmp_path).on_train_start(trainer(7), network)
    history.on_save_checkpoint(trainer(7, is_first=False), network, {})
    first, saved, *_, again = read_table(tmp_path / HISTORY)
    assert tuple(first) == COLUMNS
    assert [row["event"] for row in (first, saved, again)] == ["start", "save", "start"]
    assert [row["step"] for row in (first, saved, again)] == ["0", "7", "7"]
    assert first["weights_sha256"] != saved["weights_sha256"] == again["weights_sha256"]


def test_the_hash_is_of_names_and_every_bit():
    network = nn.Linear(3, 2)
    before = weights_hash(network.state_dict())
    network.bias.data[1] = torch.nextafter(network.bias[1], torch.tensor(9.0))
    assert weights_hash(network.state_dict()) != before
    named = [nn.ModuleDict({name: nn.Linear(2, 2)}) for name in "ab"]
    named[1]["b"].load_state_dict(named[0]["a"].state_dict())
    first, second = (weights_hash(one.state_dict()) for one in named)
    assert first != second


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_history_that_cannot_be_written_causes_a_warning(tmp_path):
    (tmp_path / HISTORY).symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="cannot be written"):
        WriteHistory(tmp_path).on_train_start(trainer(0), module(nn.Linear(1, 1)))


SETTINGS = (
    "trainer.ema_decay=0.5",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=10",
    "trainer.valid_every=2",
)


def average(run: Path, step: int) -> dict[str, torch.Tensor]:
    return saved(run, step)[AVERAGE]


@pytest.fixture(scope="module")
def run(train_tiny: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "averaged", *SETTINGS)


def test_the_average_follows_its_formula(run):
    for step in (2, 3, 4):
        decay = min(0.5, (1 + step) / (10 + step))
        before, after, now = average(run, step - 1), average(run, step), weights_of(run, step)
        for name, value in after.items():
            expected = before[name] + (1 - decay) * (now[name] - before[name])
            assert value.dtype == torch.float32
            assert torch.allclose(value, expected, rtol=1e-5, atol=1e-7), name


@pytest.mark.slow
def test_the_average_does_not_change_training(run, train):
    plain = train("plain", *SETTINGS[1:])
    torch.testing.assert_close(weights_of(plain, 4), weights_of(run, 4), rtol=0, atol=0)
    assert AVERAGE not in saved(plain, 4)


def test_the_average_is_validated(train, look_at):
    seen = []
    look_at(
        *(LanguageModeling, "validation_step"),
        lambda one, *_: seen.append(
            {name: p.clone() for name, p in one.network.named_parameters()}
        ),
    )
    run = train("run", *SETTINGS, "trainer.valid_batches=1")
    torch.testing.assert_close(seen, [average(run, step) for step in (2, 4)], rtol=0, atol=0)


def test_the_average_is_loaded_and_exported(run, tmp_path):
    averaged = average(run, 4)
    loaded = load_model(run).network.state_dict()
    export(run, tmp_path / "exported")
    exported = load_model(tmp_path / "exported").network.state_dict()
    for name, value in averaged.items():
        assert torch.equal(loaded[name], value) and torch.equal(exported[name], value), name
        assert not torch.equal(value, weights_of(run, 4)[name]), name
