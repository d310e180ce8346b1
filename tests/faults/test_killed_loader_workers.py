"""A killed run leaves no process behind: neither loader workers nor the server that forks them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest


@pytest.mark.slow
def test_loader_workers_end_with_a_killed_run(
    one_process: dict[str, str],
    tiny_settings: list[str],
    tmp_path: Path,
    wait_for_step: Callable[..., None],
) -> None:
    """SIGKILL leaves the run no time to end its workers."""
    settings = ["run_dir=run", "trainer.log_every=1", "trainer.max_steps=1000000"]
    command = [sys.executable, "-m", "protlm.train", *tiny_settings, *settings]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            [*command, "data.num_workers=2"], cwd=tmp_path, env=one_process, stdout=log, stderr=log
        )
    try:
        wait_for_step(tmp_path / "run", 2, run)
        started = descendants(run.pid)
        # The fork server, torch's two workers for training, and Python's resource tracker.
        assert len(started) >= 4, (tmp_path / "log").read_text()
    finally:
        run.kill()
        run.wait()
    deadline = time.monotonic() + 15
    while (left := running(started)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def descendants(ancestor: int) -> dict[int, str | None]:
    """The descendants of a process, by process ID, with their start times."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
    found, level = set(), {ancestor}
    while level := {pid for pid, parent in parents.items() if parent in level}:
        found |= level
    return {pid: start_time(pid) for pid in found}


def running(started: dict[int, str | None]) -> list[int]:
    """The processes of `started` that have not ended."""
    return [pid for pid, start in started.items() if start and start == start_time(pid)]


def start_time(pid: int) -> str | None:
    """When a process started, in clock ticks; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
