"""Kills a process before and after each call by which a checkpoint reaches the disk: RUN.

Prints the number of kills, and whether the latest checkpoint was the old one and the new one.
"""

import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

from protlm.checkpoints import checksums
from protlm.checkpoints import format as checkpoints
from tests.faults.programs.saving import folder, in_child, latest_step, run, save

CALLS = (
    (os, "fsync"),
    (Path, "replace"),
    (Path, "write_text"),
    (Path, "unlink"),
    (torch, "save"),
    (checksums, "sha256_of"),
)


def kill_at(number: int, when: str) -> None:
    """Makes the call of this number kill this process `before` or `after` it."""
    numbers = count(1)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_kill(*arguments: Any, **named: Any) -> Any:
            this = next(numbers)
            if (this, when) == (number, "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **named)
            if (this, when) == (number, "after"):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call_and_kill

    for owner, name in CALLS:
        setattr(owner, name, counted(getattr(owner, name)))


def save_and_die(number: int, when: str) -> None:
    """Saves the second checkpoint, and is killed at a call."""
    kill_at(number, when)
    save(2)


def save_again() -> None:
    """Saves the second checkpoint where a killed process left it, then removes it."""
    child = in_child(save, 2)
    assert os.waitpid(child, 0)[1] == 0 and latest_step() == 2
    for path in folder.iterdir():
        if path.name.startswith("step-00000002") or path.suffix == ".part":
            path.unlink()
    checkpoints.set_latest(run / checkpoints.CHECKPOINTS / checkpoints.checkpoint_name(1))


def main() -> None:
    """Kills a process at each call, until it ends first."""
    save(1)
    seen = []
    for when in ("before", "after"):
        for number in count(1):
            child = in_child(save_and_die, number, when)
            status = os.waitpid(child, 0)[1]
            seen.append(latest_step())
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                break
            save_again()
    print(len(seen), set(seen) == {1, 2})


if __name__ == "__main__":
    main()
