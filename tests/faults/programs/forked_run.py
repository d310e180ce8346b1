"""Runs in forks of one process, which pays for the imports of all of them."""

import os
import signal
import sys
import time
from pathlib import Path

import protlm.commands.train as command
from protlm.checkpoints.validations import read_metrics


def start(run_dir: str, *settings: str) -> int:
    """Forks a run with the arguments of this process, and returns its process ID."""
    if pid := os.fork():
        return pid
    os.setsid()
    sys.argv[1:] += [f"run_dir={run_dir}", *settings]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command.main()
    except SystemExit as end:
        os._exit(int(end.code or 0))
    os._exit(0)


def wait_for_step(run_dir: str, step: int) -> None:
    """Waits until the log of a run has a step."""
    while not any(row["step"] >= step for row in read_metrics(Path(run_dir) / "metrics.csv")):
        time.sleep(0.005)


def announce() -> None:
    """Makes the file that `wait_for_announcement` waits for."""
    Path(f"{os.getpid()}").touch()


def wait_for_announcement(pid: int) -> None:
    """Waits until a run has announced itself."""
    while not Path(f"{pid}").exists():
        time.sleep(0.01)


def exit_code_of(pid: int) -> int:
    """Waits for a run to end."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
