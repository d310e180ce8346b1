"""Identification of processes beyond their IDs, which the system reuses, and their imports."""

import os
import sys
from contextlib import suppress
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[1]


def ignore_modules_of_working_folder() -> None:
    """Keeps the working folder out of the import path, here and in every process started later.

    `python -m` puts it first, so that a file such as `random.py` there would replace a module of
    Python. Ranks and other children inherit the variable. A checkout of protlm that is the working
    folder stays: it may be run without being installed.
    """
    with suppress(OSError):
        if Path.cwd() == _CHECKOUT:
            return
        if not sys.flags.safe_path and sys.path[0] in ("", str(Path.cwd())):
            del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"


def start_of(pid: int) -> str | None:
    """Returns the start of a process as boot ID and clock ticks; None if it is unknown."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The name of the program, in parentheses, may contain any text; field 22 is the start time.
    return f"{boot} {status.rpartition(')')[2].split()[19]}"


def is_running(pid: int, start: str | None) -> bool:
    """Returns whether the process with this ID is running and is the one started at `start`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return start_of(pid) == start
