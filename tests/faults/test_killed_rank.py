"""Ranks of torchrun that start at different times, and one that is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.system.paths import conf_dir

pytestmark = pytest.mark.slow


def test_ranks_that_start_at_different_times_have_one_run_directory(pair_run: Path) -> None:
    """No name depends on the clock, so ranks may start in different seconds."""
    assert [path.name for path in pair_run.parent.iterdir() if path.is_dir()] == ["run"]
    assert [file for file in conf_dir().rglob("*.yaml") if "now:" in file.read_text()] == []


def test_a_killed_rank_ends_the_run_and_a_restart_resumes_it(
    one_process: dict[str, str],
    pair_settings: list[str],
    tmp_path: Path,
    wait_for_step: Callable,
    ranks_below: Callable,
    assert_gone: Callable,
    assert_same_as_pair: Callable,
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "protlm.train", *pair_settings, "run_dir=run", "trainer.devices=2"]
    with (tmp_path / "log").open("w") as log:
        started = subprocess.Popen(
            command, cwd=tmp_path, env=one_process, stdout=log, stderr=log, text=True
        )
        try:
            wait_for_step(tmp_path / "run", 12, started)
            ranks = ranks_below(started.pid)
            assert set(ranks) == {0, 1}
            os.kill(ranks[1], signal.SIGKILL)
            assert started.wait(timeout=60) != 0
        finally:
            started.kill()
    for pid in ranks.values():
        assert_gone(pid)
    again = subprocess.run(
        command, cwd=tmp_path, env=one_process, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert_same_as_pair(tmp_path / "run")
