"""The errors a user can mend, and the exit code each one ends a command with."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit status means."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    BAD_INPUT = 3
    OUTPUT = 4
    PREEMPTED = 75
    INTERRUPTED = 130


class UserError(Exception):
    """Something the user can mend: a wrong path, key, option or setting.

    The message says in one sentence or two what came, what is allowed, and what to type.
    """

    exit_code: ExitCode = ExitCode.USAGE


class InputDataError(UserError):
    """Input data that cannot be used as they are; names the file and, where known, the line."""

    exit_code = ExitCode.BAD_INPUT


class OutputError(UserError):
    """An output that cannot be written: no space, no permission, or something is there already."""

    exit_code = ExitCode.OUTPUT


def one_of(names: list[str]) -> str:
    """Writes alternatives for a message.

    >>> one_of(["b", "a"])
    'a, b'
    """
    return ", ".join(sorted(names)) if names else "(none)"
