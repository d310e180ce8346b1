"""Builds a data set as an unprivileged user, and fails if it reads its input: SOURCE OUT."""

import os
import sys

from protlm.data_prep import sources
from protlm.errors import exit_with_message
from tests.faults.programs.builder import build


class Unread:
    """An input that must not be opened."""

    def __init__(self, *arguments: object) -> None:
        raise AssertionError("the input was read")


if __name__ == "__main__":
    sources.SequenceFile = Unread
    # Root may write anywhere. The imports are done, and may be unreadable for the other user.
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    source, out = sys.argv[1:]
    exit_with_message(lambda: build([source], out))
