"""A signal to one rank, to the other, to all, once and twice: all stop after the same step."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protlm.checkpoints.format import checkpoint_name, newest_whole, step_of
from protlm.checkpoints.validations import read_metrics
from protlm.system.errors import ExitCode
from protlm.training.callbacks.preemption import StopOnSignal
from protlm.training.launch import SIGNALS
from protlm.training.module import LanguageModeling

Train = Callable[..., Path]
Read = Callable[[Path], Any]
Start = Callable[..., "subprocess.Popen[str]"]

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.slow
@pytest.mark.parametrize("turns", [3, 60])
def test_both_ranks_stop_after_the_same_step_and_resume(
    turns: int, run_ranks: Callable, tmp_path: Path, state_of: Read, log_of: Read
) -> None:
    one, other = run_ranks(tmp_path, PROGRAMS / "signal_ranks.py", turns)
    assert one == other
    ended, whole = json.loads(one)
    assert [code for _, code in ended] == [ExitCode.PREEMPTED] * turns
    steps = [step for step, _ in ended]
    assert steps == sorted(set(steps)) and whole == [steps[-1], ExitCode.OK]
    name = checkpoint_name(steps[-1])
    found, expected = (state_of(tmp_path / run / "checkpoints" / name) for run in ("run", "whole"))
    assert [key for key in expected if found[key] != expected[key]] == []
    # The uninterrupted run also validates after its last step.
    assert log_of(tmp_path / "run") == [
        row for row in log_of(tmp_path / "whole") if row in log_of(tmp_path / "run")
    ]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_each_signal_ends_a_run_with_a_checkpoint(
    name: str, train_tiny: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation that is due is postponed to the next start."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    signal_in_step(monkeypatch, 2, signal.Signals[name])
    monkeypatch.setattr(LanguageModeling, "validation_step", lambda *_: pytest.fail("validates"))
    with pytest.raises(SystemExit) as ended:
        train_tiny(tmp_path / "run", "trainer.valid_every=2")
    is_interrupt = name == "SIGINT"
    assert ended.value.code == (ExitCode.INTERRUPTED if is_interrupt else ExitCode.PREEMPTED)
    newest, _ = newest_whole(tmp_path / "run")
    assert newest is not None and step_of(newest) == 2
    assert {each: signal.getsignal(each) for each in SIGNALS} == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(SIGNALS) == set()


def test_an_interrupted_validation_is_repeated(
    train_tiny: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_of: Read
) -> None:
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
    newest, _ = newest_whole(tmp_path / "run")
    assert newest is not None and step_of(newest) == 2
    assert not [
        row for row in read_metrics(tmp_path / "run" / "metrics.csv") if "valid_loss" in row
    ]
    train_tiny(tmp_path / "run", *settings)
    assert log_of(tmp_path / "run") == log_of(whole)


def test_inside_a_slurm_job_lightning_has_no_handler(
    train_tiny: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    signal_in_step(monkeypatch, 3, signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended:
        train_tiny(tmp_path / "run")
    assert ended.value.code == ExitCode.PREEMPTED
    assert {getattr(handler, "__func__", handler) for handler in handlers} == {StopOnSignal._note}
    newest, _ = newest_whole(tmp_path / "run")
    assert newest is not None and step_of(newest) == 3


@pytest.fixture
def start_two_ranks(one_process: dict[str, str], tiny_settings: list[str], tmp_path: Path) -> Start:
    """Starts `protlm train` with two ranks, whose output is written to `log`."""

    def start(*further: str) -> "subprocess.Popen[str]":
        settings = [*tiny_settings, "run_dir=run", "trainer.devices=2", *further]
        with (tmp_path / "log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "protlm", "train", *settings],
                cwd=tmp_path,
                env=one_process,
                stdout=log,
                stderr=log,
                text=True,
            )

    return start


@pytest.mark.slow
def test_the_command_with_two_ranks_ends_with_75_and_leaves_nothing_running(
    start_two_ranks: Start,
    tmp_path: Path,
    wait_for_step: Callable,
    ranks_below: Callable,
    assert_gone: Callable,
) -> None:
    """Lightning's launcher starts rank 1, which receives the signal."""
    first = start_two_ranks("trainer.log_every=1", "trainer.max_steps=100000")
    try:
        wait_for_step(tmp_path / "run", 3, first)
        (second,) = ranks_below(first.pid).values()
        os.kill(second, signal.SIGTERM)
        assert first.wait(timeout=100) == ExitCode.PREEMPTED, (tmp_path / "log").read_text()
    finally:
        first.kill()
    assert "the same command continues" in (tmp_path / "log").read_text()
    assert_gone(second)
    newest, faults = newest_whole(tmp_path / "run")
    assert newest is not None and faults == []


@pytest.mark.slow
def test_a_signal_to_a_starting_rank_ends_the_run_with_its_exit_code(
    start_two_ranks: Start,
    tmp_path: Path,
    ranks_below: Callable,
    assert_gone: Callable,
) -> None:
    """Rank 1 is still importing modules, and rank 0 waits for it."""
    first = start_two_ranks()
    try:
        deadline = time.monotonic() + 200
        while not (found := ranks_below(first.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert set(found) == {1}, (tmp_path / "log").read_text()
        os.kill(found[1], signal.SIGTERM)
        assert first.wait(timeout=100) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
    finally:
        first.kill()
    assert "rank 1 ended with exit code 143" in (tmp_path / "log").read_text()
    assert_gone(found[1])


@pytest.mark.slow
def test_a_signal_to_one_rank_before_the_first_step(run_ranks: Callable, tmp_path: Path) -> None:
    """While the loaders start, Lightning's handler would wait for the other rank."""
    printed = run_ranks(tmp_path, PROGRAMS / "signal_while_starting.py")
    assert [json.loads(told) for told in printed] == [[1, 75]] * 2


def signal_in_step(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Makes this process send itself a signal during an optimizer step."""
    work = LanguageModeling.training_step

    def training_step(self: LanguageModeling, batch: Any, index: int) -> Any:
        if self.trainer.global_step == step - 1:
            os.kill(os.getpid(), number)
        return work(self, batch, index)

    monkeypatch.setattr(LanguageModeling, "training_step", training_step)
