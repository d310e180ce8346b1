"""Identification of processes beyond their IDs, which the system reuses."""

import os
from pathlib import Path


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
