"""Kills builds at random moments until one of each is complete: SOURCE FOLDER KILLS SEED [TABLE].

One process imports everything and forks the builders, so that their time is spent on building.
A builder has its own process group, and its workers die with it.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from protlm.errors import exit_with_message
from tests.faults.programs.builder import build, contents

source, folder, kills, seed, *tables = sys.argv[1:]
whole, out, partial = (Path(folder) / name for name in ("whole", "data", "data.partial"))


def start(workers: int, out: Path = out) -> int:
    """Forks a builder, and returns its process ID."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        exit_with_message(lambda: build([source], out, *tables, workers=workers, deduplicate=True))
    return pid


def finished_segments() -> int:
    """Returns the number of segments in the journal."""
    return len(list(partial.glob("journal/segment-*.json")))


def wait_for(pid: int, segments: int) -> None:
    """Waits until there are segments, or the builder has ended; its exit status stays unread."""
    while finished_segments() < segments:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.001)


def kill_at_random(killed: int, seconds: float) -> int:
    """Starts a builder, kills its process group, and returns its exit status."""
    before = finished_segments()
    pid = start(workers=random.choice([1, 2]))
    # Every other builder finishes some segments, however slow the machine is.
    wait_for(pid, before + killed % 2 * random.choice([1, 3]))
    time.sleep(random.uniform(0, 0.2 * seconds))
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def main() -> None:
    """Kills builders; compares each complete build with one that was not interrupted."""
    random.seed(int(seed))
    began = time.monotonic()
    assert os.waitpid(start(1, whole), 0)[1] == 0
    seconds = time.monotonic() - began
    killed, kept = 0, []
    while killed < int(kills):
        status = kill_at_random(killed, seconds)
        killed += os.WIFSIGNALED(status)
        if os.WIFSIGNALED(status) and not out.exists():
            kept.append(finished_segments())
            continue
        assert status in (0, signal.SIGKILL), status
        assert contents(out) == contents(whole)
        shutil.rmtree(out)
    assert os.waitpid(start(1), 0)[1] == 0
    assert contents(out) == contents(whole)
    assert sorted(path.name for path in Path(folder).iterdir()) == ["data", "whole"]
    print(json.dumps({"killed": killed, "kept": kept}))


if __name__ == "__main__":
    main()
