"""Signals end a run with a checkpoint and its exit code, whenever they come; it resumes exactly."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protlm.checkpoints.format import checkpoint_name, newest_whole, step_of
from protlm.system.errors import ExitCode
from protlm.training.callbacks.preemption import StopOnSignal
from protlm.training.launch import SIGNALS
from protlm.training.module import LanguageModeling
from tests.fixtures.ranks import assert_same_checkpoint


@pytest.fixture
def signal_in_steps(monkeypatch) -> Callable[..., None]:
    """Makes this process send itself a signal during these optimizer steps."""

    def patch(number: signal.Signals, *steps: int) -> None:
        work = LanguageModeling.training_step

        def training_step(self: LanguageModeling, batch: Any, index: int) -> Any:
            if self.trainer.global_step + 1 in steps:
                os.kill(os.getpid(), number)
            return work(self, batch, index)

        monkeypatch.setattr(LanguageModeling, "training_step", training_step)

    return patch


def newest_step(run: Path) -> int:
    newest, faults = newest_whole(run)
    assert newest is not None and faults == []
    return step_of(newest)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_each_signal_ends_a_run_with_a_checkpoint(
    name, signal_in_steps, train_tiny, tmp_path, monkeypatch
):
    """A validation that is due is postponed to the next start."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    signal_in_steps(signal.Signals[name], 2)
    monkeypatch.setattr(LanguageModeling, "validation_step", lambda *_: pytest.fail("validates"))
    with pytest.raises(SystemExit) as ended:
        train_tiny(tmp_path / "run", "trainer.valid_every=2")
    is_interrupt = name == "SIGINT"
    assert ended.value.code == (ExitCode.INTERRUPTED if is_interrupt else ExitCode.PREEMPTED)
    assert newest_step(tmp_path / "run") == 2
    assert {each: signal.getsignal(each) for each in SIGNALS} == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(SIGNALS) == set()


def test_an_interrupted_validation_is_repeated(train_tiny, tmp_path, monkeypatch, log_of):
    settings = (
        "data.tokens_per_batch=128",
        "trainer.valid_every=2",
        "trainer.checkpoint_every=100",
    )
    whole = train_tiny(tmp_path / "whole", *settings)
    validate, seen = LanguageModeling.validation_step, []

    def validation_step(self: LanguageModeling, batch: Any, index: int) -> None:
        seen.append(index)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        validate(self, batch, index)

    monkeypatch.setattr("protlm.training.callbacks.preemption.VALIDATION_BATCHES", 3)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(LanguageModeling, "validation_step", validation_step)
        train_tiny(tmp_path / "run", *settings)
    assert ended.value.code == ExitCode.PREEMPTED
    assert len(seen) == 3
    assert newest_step(tmp_path / "run") == 2
    assert not [row for row in log_of(tmp_path / "run") if "valid_loss" in row]
    train_tiny(tmp_path / "run", *settings)
    assert log_of(tmp_path / "run") == log_of(whole)


def test_inside_a_slurm_job_lightning_has_no_handler(
    signal_in_steps, train_tiny, tmp_path, monkeypatch
):
    """Lightning's handler would save a checkpoint within the handler, and call scontrol."""
    variables = {"JOB_ID": "4711", "JOB_NAME": "protlm", "NTASKS": "1", "NNODES": "1"}
    variables |= {"PROCID": "0", "LOCALID": "0", "NODEID": "0", "STEP_ID": "0"}
    variables |= {"NTASKS_PER_NODE": "1", "NODELIST": "127.0.0.1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    handlers = []

    def on_train_start(self: StopOnSignal, *rest: Any) -> None:
        handlers.extend(signal.getsignal(number) for number in SIGNALS)

    monkeypatch.setattr(StopOnSignal, "on_train_start", on_train_start)
    signal_in_steps(signal.SIGUSR1, 3)
    with pytest.raises(SystemExit) as ended:
        train_tiny(tmp_path / "run")
    assert ended.value.code == ExitCode.PREEMPTED
    assert {getattr(handler, "__func__", handler) for handler in handlers} == {StopOnSignal._note}
    assert newest_step(tmp_path / "run") == 3


@pytest.mark.slow
def test_a_run_that_is_requeued_five_times_has_one_log(
    signal_in_steps, train_tiny, tmp_path, log_of
):
    settings = (
        "attention=performer_softmax",
        "attention.num_features=32",
        "attention.redraw_every=3",
        "model.qk_norm=true",
        "model.dropout=0.1",
        "trainer.valid_every=4",
        "trainer.log_every=3",
        "trainer.checkpoint_every=100",
        "trainer.max_steps=14",
    )
    whole, run = train_tiny(tmp_path / "whole", *settings), tmp_path / "run"
    # In the first step, where a validation is due, after a row of the log, and twice in a row.
    due = (1, 4, 6, 7, 11)
    signal_in_steps(signal.SIGUSR1, *due)
    for step in due:
        with pytest.raises(SystemExit) as ended:
            train_tiny(run, *settings)
        assert ended.value.code == ExitCode.PREEMPTED
        assert newest_step(run) == step
    train_tiny(run, *settings)
    rows = log_of(run)
    assert rows == log_of(whole)
    assert [row["step"] for row in rows if "train_loss" in row] == [3, 6, 9, 12]
    assert [row["step"] for row in rows if "valid_loss" in row] == [4, 8, 12, 14]
    last = f"checkpoints/{checkpoint_name(14)}"
    assert_same_checkpoint(run / last, whole / last)


@pytest.mark.slow
def test_second_repeated_and_early_signals_have_their_exit_codes(told_by, tiny_settings, tmp_path):
    assert told_by("signal_runs.py", *tiny_settings, cwd=tmp_path) == {
        # At once, although the step never ends, with the code of the second signal.
        "twice": 128 + 15,
        "mixed": 128 + 2,
        # The same signal from the process group and from the launcher counts once.
        "repeated": ExitCode.PREEMPTED,
        "group-term": ExitCode.PREEMPTED,
        "group-usr1": ExitCode.PREEMPTED,
        # By the signal itself: no file has been written.
        "early-term": -signal.SIGTERM,
        "early-usr1": -signal.SIGUSR1,
        "early-usr2": -signal.SIGUSR2,
        # A signal that arrived before the handlers were set is handled when they are.
        "between": ExitCode.PREEMPTED,
    }
    assert not list(tmp_path.glob("early*"))
    assert newest_step(tmp_path / "between") == 1
    for pid in (path.name for path in tmp_path.iterdir() if path.name.isdigit()):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
