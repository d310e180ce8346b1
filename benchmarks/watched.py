"""A command run to its end: how long it took, and the most memory that it and its children held."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from protlm.errors import UserError

_SECONDS_BETWEEN_LOOKS = 0.1


class Watched(NamedTuple):
    """What a command took.

    `peak_bytes` adds up its processes, pages that they share counted once, mapped files too.
    """

    seconds: float
    peak_bytes: int


def watch(command: Sequence[str | Path]) -> Watched:
    """Runs a command and looks at its memory ten times a second (Linux alone tells).

    Raises:
        UserError: the command failed.
    """
    start, peak = time.perf_counter(), 0
    with subprocess.Popen(command, start_new_session=True) as process:
        while process.poll() is None:
            peak = max(peak, _memory_of_session(process.pid))
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    if process.returncode:
        raise UserError(f"{' '.join(map(str, command))} ended with {process.returncode}")
    return Watched(time.perf_counter() - start, peak)


def _memory_of_session(session: int) -> int:
    return sum(_memory(int(p.name)) for p in Path("/proc").glob("[0-9]*") if _is_in(p, session))


def _is_in(process: Path, session: int) -> bool:
    try:
        return os.getsid(int(process.name)) == session
    except ProcessLookupError:
        return False


def _memory(process: int) -> int:
    """The proportional set size, in bytes; 0 of a process that has ended meanwhile."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
