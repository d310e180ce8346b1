"""Kills the reader or an encoder of a build and repeats it: SOURCE FOLDER reader|encoder."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from protlm.data_prep.segments import OpenSegment  # pyright: ignore[reportMissingImports]
from protlm.system.errors import exit_with_message
from tests.faults.programs.builder import build, contents

source, folder, victim = sys.argv[1:]
whole, out, partial = (Path(folder) / name for name in ("whole", "data", "data.partial"))
write = OpenSegment.write


def write_and_wait(*arguments: Any) -> None:
    """Writes a block, and leaves time for a kill."""
    write(*arguments)
    time.sleep(0.5)


def start() -> int:
    """Forks a builder with two encoders, and returns its process ID."""
    pid = os.fork()
    if pid == 0:
        OpenSegment.write = write_and_wait
        exit_with_message(lambda: build([source], out, workers=2, deduplicate=True))
    return pid


def main() -> None:
    """Kills one of the three processes, and repeats the build."""
    build([source], whole, deduplicate=True)
    pid = start()
    while not list(partial.glob("journal/segment-*.json")):
        assert not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        time.sleep(0.001)
    workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(workers) == 2, workers
    os.kill(pid if victim == "reader" else int(workers[0]), signal.SIGKILL)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # A build whose killed encoder had no work left may complete with the other one.
    assert ended in ([-signal.SIGKILL] if victim == "reader" else [0, 1]), ended
    assert out.exists() == (ended == 0)
    if ended:
        build([source], out, workers=2, deduplicate=True)
    assert contents(out) == contents(whole)
    assert sorted(path.name for path in Path(folder).iterdir()) == ["data", "whole"]


if __name__ == "__main__":
    main()
