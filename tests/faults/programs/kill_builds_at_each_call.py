"""Kills builds before and after each call that changes the disk: SOURCE FOLDER [TABLE].

After each kill the build is repeated; the number of builds is printed.
"""

import os
import shutil
import sys
from pathlib import Path

from protlm.system.errors import OutputError, exit_with_message
from tests.faults.programs.builder import build, contents
from tests.faults.programs.kills import killed_at_each_call

CALLS = [(os, name) for name in ("replace", "rename", "mkdir", "unlink", "rmdir", "fsync")]
source, folder, *tables = sys.argv[1:]
whole, out = Path(folder) / "whole", Path(folder) / "data"


def build_and_exit() -> None:
    """Builds as a command does."""
    exit_with_message(lambda: build([source], out, *tables))


def repeat() -> None:
    """Repeats a build, which is an error only if it was complete."""
    was_there = out.exists()
    try:
        build([source], out, *tables)
    except OutputError as error:
        assert was_there and "exists already" in str(error), error
    else:
        assert not was_there


if __name__ == "__main__":
    build([source], whole, *tables)
    for step in killed_at_each_call(CALLS, build_and_exit):
        repeat()
        assert contents(out) == contents(whole), step
        assert sorted(path.name for path in Path(folder).iterdir()) == ["data", "whole"], step
        shutil.rmtree(out)
        print(step)
