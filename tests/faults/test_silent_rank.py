"""A rank that stalls: all ranks end after the time-out, and the log has the stack of each."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "train_with_stalled_rank.py"


@pytest.mark.slow
@pytest.mark.parametrize("stalled", [0, 1])
def test_the_time_out_ends_all_ranks(
    stalled: int,
    one_process: dict[str, str],
    tiny_settings: list[str],
    tmp_path: Path,
    assert_gone: Callable,
) -> None:
    """Under Lightning's launcher, where rank 0 starts rank 1."""
    settings = [*tiny_settings, "run_dir=run", "trainer.devices=2", "trainer.timeout_minutes=0.2"]
    done = subprocess.run(
        [sys.executable, PROGRAM, *settings, "trainer.max_steps=100"],
        cwd=tmp_path,
        env={**one_process, "STALLED_RANK": str(stalled)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode != 0
    # The stacks of the stalled rank and of the rank that waits for it.
    assert "in stall" in done.stderr
    assert "in all_reduce" in done.stderr or "_engine_run_backward" in done.stderr
    waiting = 1 - stalled
    assert f"rank {waiting} has lost another rank" in done.stderr
    assert "trainer.timeout_minutes=0.2" in done.stderr
    assert "internal error" not in done.stderr
    assert_gone(int((tmp_path / "stalled").read_text()))
