"""Builds a data set, and is killed at a call within the lock: SOURCE OUT MODULE FUNCTION MODE.

MODE is `a` to leave the lock file as it is, `w` to truncate it before the kill.
"""

import os
import signal
import sys
from pathlib import Path

from protlm.system import lock
from tests.faults.programs.builder import build

source, out, module, function, mode = sys.argv[1:]


def kill(*arguments: object, **named: object) -> None:
    """Opens the lock file, and kills this process."""
    next(Path(out).parent.rglob(lock.LOCK)).open(mode)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    setattr(getattr(lock, module), function, kill)
    build([source], out)
