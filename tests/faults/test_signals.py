"""Signals end a run with a checkpoint and its exit code, whenever they come; it resumes exactly."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from protlm.checkpoints.format import newest_whole, step_of
from protlm.system.errors import ExitCode
from protlm.training.launch import SIGNALS
from protlm.training.module import LanguageModeling
from tests.fixtures.calls import looked_at
from tests.fixtures.ranks import wait_for_step


def newest_step(run: Path) -> int:
    newest, faults = newest_whole(run)
    assert newest is not None and faults == []
    return step_of(newest)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_each_signal_ends_a_run_with_a_checkpoint(
    name, look_at, train, tmp_path, monkeypatch, capfd
):
    """It is answered at once; a validation that is due is postponed to the next start."""
    before = {each: signal.getsignal(each) for each in SIGNALS}

    def send(module: LanguageModeling, *_: Any) -> None:
        if module.trainer.global_step == 1:
            os.kill(os.getpid(), signal.Signals[name])

    look_at(LanguageModeling, "training_step", send)
    monkeypatch.setattr(LanguageModeling, "validation_step", lambda *_: pytest.fail("validates"))
    with pytest.raises(SystemExit) as ended:
        train("run", "trainer.valid_every=2")
    is_interrupt = name == "SIGINT"
    assert ended.value.code == (ExitCode.INTERRUPTED if is_interrupt else ExitCode.PREEMPTED)
    assert newest_step(tmp_path / "run") == 2
    assert "stopping after this step, with a checkpoint" in capfd.readouterr().err
    assert {each: signal.getsignal(each) for each in SIGNALS} == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(SIGNALS) == set()


@pytest.mark.slow
def test_an_interrupted_validation_is_repeated(train, tmp_path, monkeypatch, log_of):
    settings = (
        "data.tokens_per_batch=128",
        "trainer.valid_every=2",
        "trainer.checkpoint_every=100",
    )
    whole = train("whole", *settings)
    seen = []

    def signal_once(_: LanguageModeling, batch: Any, index: int) -> None:
        seen.append(index)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr("protlm.training.callbacks.preemption.VALIDATION_BATCHES", 3)
    stopped = looked_at(LanguageModeling, "validation_step", signal_once)
    with stopped, pytest.raises(SystemExit) as ended:
        train("run", *settings)
    assert ended.value.code == ExitCode.PREEMPTED
    assert len(seen) == 3
    assert newest_step(tmp_path / "run") == 2
    assert not [row for row in log_of(tmp_path / "run") if "valid_loss" in row]
    train("run", *settings)
    assert log_of(tmp_path / "run") == log_of(whole)


TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
# What a run does, the signals that are sent to it then, and how it ends.
SENT = {
    # At once, although the step never ends, with the code of the second signal.
    "twice": ("hang", [TERM, TERM], 128 + 15),
    "mixed": ("hang", [USR1, signal.SIGINT], 128 + 2),
    # The same signal from the process group and from the launcher counts once.
    "repeated": ("signal-repeatedly", [], ExitCode.PREEMPTED),
    # By the signal itself: no file has been written.
    "early": ("open-slowly", [TERM], -TERM),
    "early, of a cluster": ("open-slowly", [USR2], -USR2),
    # A signal that arrived before the handlers were set is handled when they are.
    "between": ("signal-before-the-start", [], ExitCode.PREEMPTED),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "sent", "code"), SENT.values(), ids=SENT)
def test_second_repeated_and_early_signals_have_their_exit_codes(
    fault, sent, code, start_ranks, tmp_path
):
    (pid,), wait = start_ranks(tmp_path, fault, "run_dir=run", "trainer.max_steps=9")
    deadline = time.monotonic() + 100
    while sent and not (tmp_path / "announced").exists():
        assert time.monotonic() < deadline, (tmp_path / "rank-0.log").read_text()
        time.sleep(0.01)
    for number in sent:
        os.kill(pid, number)
        time.sleep(1.2 if len(sent) > 1 else 0)
    assert wait() == [code]
    assert (tmp_path / "run").exists() == (fault != "open-slowly")
    if fault == "signal-before-the-start":
        assert newest_step(tmp_path / "run") == 1


@pytest.mark.slow
def test_loader_workers_serve_a_run_until_it_has_stopped(start_ranks, tmp_path):
    """SLURM sends a signal to the run and to its workers."""
    settings = ("trainer.max_steps=100000", "trainer.log_every=1", "data.num_workers=1")
    (pid,), wait = start_ranks(tmp_path, "none", "run_dir=run", *settings)
    wait_for_step(tmp_path / "run", 3)
    os.killpg(pid, USR1)
    assert wait() == [ExitCode.PREEMPTED]
