"""The commands of a study, several at a time and ended with it by SIGTERM, and their logs."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from protlm.checkpoints.validations import METRICS, read_metrics

_T = TypeVar("_T")
_RUNNING = set[subprocess.Popen[bytes]]()


def protlm(*arguments: str) -> None:
    """Runs a command of protlm, whose failure is one of the study."""
    command = [sys.executable, "-m", "protlm", *arguments]
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


def train(settings: Iterable[str], folder: Path, *, steps: int) -> None:
    """Trains a model, or continues it; one that has been validated after its last step is done.

    Args:
        settings: of `protlm train`.
        folder: of the run.
        steps: their number, with a warm-up of an eighth of them.
    """
    if steps in validations(folder):
        return
    length = [f"trainer.max_steps={steps}", f"schedule.warmup_steps={steps // 8}"]
    protlm("train", *in_order([*settings, *length, f"run_dir={folder}"]))


def in_order(settings: Iterable[str]) -> list[str]:
    """Returns settings with choices of groups before their values; the later of two counts.

    >>> in_order(["data.dir=a", "model=medium", "data.dir=b"])
    ['model=medium', 'data.dir=b']
    """
    last = {one.split("=")[0]: one for one in settings}
    return sorted(last.values(), key=lambda one: "." in one.split("=")[0])


def validations(folder: Path) -> dict[int, float]:
    """Returns the validation losses of a run by their step."""
    rows = (row for row in log(folder) if "valid_loss" in row)
    return {int(row["step"]): row["valid_loss"] for row in rows}


def log(folder: Path) -> list[dict[str, float]]:
    """Returns the rows of the log of a run, each with the columns that have a value, or no rows."""
    return read_metrics(folder / METRICS)


def name_of(arm: str) -> str:
    """Returns the name of the folder of an arm.

    >>> name_of("hybrid, aligned ±8")
    'hybrid_aligned_8'
    """
    return re.sub(r"[^\w.-]+", "_", arm.replace("±", ""))


def end_by_signal() -> None:
    """Makes SIGTERM end the running commands, which keep what they have, and the study."""

    def end(*_: object) -> None:
        for process in list(_RUNNING):
            process.terminate()
        sys.exit("ended by SIGTERM; the same command continues")

    signal.signal(signal.SIGTERM, end)
