"""The commands of a study: several at a time, and ended with it by SIGTERM."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_RUNNING = set[subprocess.Popen[bytes]]()


def run(command: Sequence[str]) -> None:
    """Runs a command, whose failure is one of the study."""
    with subprocess.Popen(command) as process:
        _RUNNING.add(process)
        try:
            code = process.wait()
        finally:
            _RUNNING.discard(process)
    if code:
        raise subprocess.CalledProcessError(code, command)


def side_by_side(function: Callable[[_T], object], items: Iterable[_T], jobs: int) -> None:
    """Calls a function for all items in order, several at a time; a failure stops the rest."""
    with ThreadPoolExecutor(jobs) as pool:
        calls = [pool.submit(function, item) for item in items]
        try:
            for call in calls:
                call.result()
        finally:
            for call in calls:
                call.cancel()


def end_by_signal() -> None:
    """Makes SIGTERM end the running commands, which keep what they have, and the study."""

    def end(*_: object) -> None:
        for process in list(_RUNNING):
            process.terminate()
        sys.exit("ended by SIGTERM; the same command continues")

    signal.signal(signal.SIGTERM, end)
