"""Kills builds before and after each call that changes the disk: SOURCE FOLDER [TABLE].

After each kill the build is repeated; the number of builds is printed.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from protlm.errors import OutputError, exit_with_message
from tests.faults.programs.builder import build, contents

CALLS = ("replace", "rename", "mkdir", "unlink", "rmdir", "fsync")
source, folder, *tables = sys.argv[1:]
whole, out = Path(folder) / "whole", Path(folder) / "data"


def kill_at(step: int) -> None:
    """Makes the call of this number kill this process: before an odd one, after an even one."""
    numbers = count(1)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_kill(*arguments: Any, **named: Any) -> Any:
            number = next(numbers)
            if number == step and step % 2 == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*arguments, **named)
            finally:
                if number == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call_and_kill

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def kill_once(step: int) -> int:
    """Builds in a child that is killed at a step; returns its exit status."""
    pid = os.fork()
    if pid == 0:
        kill_at(step)
        exit_with_message(lambda: build([source], out, *tables))
    return os.waitpid(pid, 0)[1]


def repeat() -> None:
    """Repeats a build, which is an error only if it was complete."""
    was_there = out.exists()
    try:
        build([source], out, *tables)
    except OutputError as error:
        assert was_there and "exists already" in str(error), error
    else:
        assert not was_there


def main() -> None:
    """Kills builds at one step after the other, until one of them ends first."""
    build([source], whole, *tables)
    for step in count(1):
        status = kill_once(step)
        assert status in (0, signal.SIGKILL), (step, status)
        repeat()
        assert contents(out) == contents(whole), step
        assert sorted(path.name for path in Path(folder).iterdir()) == ["data", "whole"], step
        shutil.rmtree(out)
        if status == 0:
            print(step)
            return


if __name__ == "__main__":
    main()
