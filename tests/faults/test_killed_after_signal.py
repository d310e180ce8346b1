"""SIGKILL soon after a signal, a second signal, and signals before the run has started.

Imports are slow, so one process imports the modules, and forks of it train.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protlm.checkpoints.format import newest_whole, step_of

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def run_program(
    one_process: dict[str, str], tiny_settings: list[str], tmp_path: Path
) -> Callable[..., Any]:
    """Runs a program and returns what it prints: the exit codes of its runs."""

    def run(program: str, *arguments: str) -> Any:
        done = subprocess.run(
            [sys.executable, PROGRAMS / program, *arguments, *tiny_settings],
            cwd=tmp_path,
            env=one_process,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.slow
def test_a_run_killed_soon_after_a_signal_resumes(
    run_program: Callable, train_tiny: Callable[..., Path], tmp_path: Path, log_of: Callable
) -> None:
    """Either the new checkpoint or the previous one is intact, and the run resumes from it."""
    turns = 12
    codes = run_program("kill_after_signal.py", str(turns))
    # Some were killed before they had saved and ended, and no start failed.
    assert set(codes) <= {-9, 75} and -9 in codes
    run = tmp_path / "run"
    newest, faults = newest_whole(run)
    assert newest is not None and faults == []
    last = step_of(newest) + 2
    settings = ("trainer.log_every=1", "trainer.valid_every=5", f"trainer.max_steps={last}")
    train_tiny(run, *settings)
    whole = train_tiny(tmp_path / "whole", *settings)
    assert log_of(run) == log_of(whole)


@pytest.mark.slow
def test_second_repeated_and_early_signals_have_their_exit_codes(
    run_program: Callable, tmp_path: Path
) -> None:
    codes = run_program("signal_runs.py")
    # At once, although the step never ends, with the code of the second signal.
    assert (codes["twice"], codes["mixed"]) == (128 + 15, 128 + 2)
    # The same signal from the process group and from the launcher counts once.
    assert codes["repeated"] == 75 and codes["groups"] == [75, 75]
    # By the signal itself: no file has been written.
    assert codes["early"] == [-15, -10, -12]
    assert not (tmp_path / "early").exists()
    # A signal that arrived before the handlers were set is handled when they are.
    assert codes["between"] == 75
    newest, _ = newest_whole(tmp_path / "between")
    assert newest is not None and step_of(newest) == 1
    for pid in (path.name for path in tmp_path.iterdir() if path.name.isdigit()):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
