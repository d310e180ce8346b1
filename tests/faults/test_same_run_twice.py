"""Of two processes that train one run, the second is rejected and names the first."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from protlm.checkpoints.format import all_checkpoints, step_of
from protlm.system.errors import ExitCode, OutputError
from protlm.system.lock import LOCK
from protlm.training.callbacks.save_checkpoints import SaveCheckpoints
from protlm.training.launch import locked

PROGRAM = Path(__file__).parent / "programs" / "hold_lock.py"
Train = Callable[..., Path]
ELSEWHERE = '{"host": "elsewhere", "pid": 7, "since": "2026-01-01T00:00:00+00:00"}'


@contextmanager
def held(run: Path) -> Iterator[dict[str, Any]]:
    """Starts a process that locks a run, and yields the owner of the lock."""
    run.mkdir(exist_ok=True)
    with subprocess.Popen(
        [sys.executable, PROGRAM, run],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        try:
            yield json.loads((run / LOCK).read_text())
        finally:
            process.kill()
    (run / LOCK).unlink()


def test_the_second_process_is_rejected(
    train_tiny: Train, tmp_path: Path, contents: Callable[[Path], dict[str, bytes]]
) -> None:
    """For a new run and for an existing one, in which no file changes."""
    run = tmp_path / "run"
    for steps in (2, 4):
        with held(run) as owner:
            before = contents(run)
            with pytest.raises(OutputError) as refused:
                train_tiny(run, f"trainer.max_steps={steps}")
            assert "process {pid} on {host} since {since}".format(**owner) in str(refused.value)
            assert "choose another run_dir=" in str(refused.value)
            assert refused.value.exit_code == ExitCode.OUTPUT
            assert contents(run) == before
        train_tiny(run, f"trainer.max_steps={steps}")
        assert not (run / LOCK).exists()


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (lambda run: (run / LOCK).unlink(), "lock.json is gone: it was removed"),
        (
            lambda run: (run / LOCK).write_text(ELSEWHERE),
            "lock.json now belongs to process 7 on elsewhere",
        ),
        (lambda run: run.rename(run.with_name("moved")), "lock.json is gone.*folder was moved"),
    ],
)
def test_a_run_that_lost_its_lock_stops_without_a_checkpoint(
    happens: Callable[[Path], None],
    reason: str,
    train_tiny: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process may write there now; a folder that was moved is not made again."""
    run, save = tmp_path / "run", SaveCheckpoints.on_train_batch_end

    def interfere(self: SaveCheckpoints, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step == 4:
            happens(run)
        save(self, trainer, *rest)

    monkeypatch.setattr(SaveCheckpoints, "on_train_batch_end", interfere)
    with pytest.raises(OutputError, match=f"{reason}.*the last checkpoint is step 2") as stopped:
        train_tiny(run, "trainer.checkpoint_every=2", "trainer.max_steps=4")
    assert stopped.value.exit_code == ExitCode.OUTPUT
    (left,) = tmp_path.iterdir()
    assert [step_of(path) for path in all_checkpoints(left)] == [2]


def test_other_ranks_of_the_run_do_not_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCK).write_text(ELSEWHERE)
    for variable in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            with locked(tmp_path):
                pass
    assert (tmp_path / LOCK).exists()


def test_the_lock_is_released_when_the_run_ends(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).is_file()
        raise KeyboardInterrupt
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
def test_the_second_of_two_commands_is_rejected(
    tiny_data: Path, tmp_path: Path, protlm_command: Callable
) -> None:
    """The first process, which has two ranks, continues undisturbed."""
    settings = [
        *("model=tiny", f"data.dir={tiny_data}", "run_dir=run", "data.max_length=128"),
        *("trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_steps=100000"),
    ]
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "TORCHELASTIC_")) and "RANK" not in key
    }
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        [sys.executable, "-m", "protlm.train", *settings],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (tmp_path / "run" / "metrics.csv").exists():
            assert first.poll() is None
            time.sleep(0.1)
        second = protlm_command("train", *settings, cwd=tmp_path)
        assert second.returncode == ExitCode.OUTPUT, second.stderr
        assert f"process {first.pid} on {socket.gethostname()}" in second.stderr
        assert "Traceback" not in second.stderr
        first.send_signal(signal.SIGTERM)
        told = first.communicate(timeout=120)[1]
        assert first.returncode == ExitCode.PREEMPTED, told
    finally:
        first.kill()
    assert not (tmp_path / "run" / LOCK).exists()
