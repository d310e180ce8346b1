"""When a process is killed while it writes a checkpoint, `latest` still names an intact one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = Path(__file__).parent / "programs"


def run_program(program: str, run: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAMS / program, run],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_killed_at_30_random_moments(tmp_path: Path) -> None:
    assert run_program("kill_saving_at_random.py", tmp_path / "run") == "30"


@pytest.mark.slow
def test_killed_before_and_after_each_call(tmp_path: Path) -> None:
    calls, is_both = run_program("kill_saving_at_each_call.py", tmp_path / "run").split()
    assert int(calls) > 20
    assert is_both == "True"
