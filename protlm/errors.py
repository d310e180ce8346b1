"""The errors a user can mend, and the exit code each one ends a command with."""

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from typing import NoReturn


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


class TrainingDivergedError(UserError):
    """Bad steps in a row; the run stops, and none of them is in a checkpoint."""

    exit_code = ExitCode.INTERNAL


class LostRankError(UserError):
    """Another process of the run has ended, or does not answer."""

    exit_code = ExitCode.INTERNAL


def one_of(names: list[str]) -> str:
    """Writes alternatives for a message.

    >>> one_of(["b", "a"])
    'a, b'
    """
    return ", ".join(sorted(names)) if names else "(none)"


def refuse_unknown(option: str, value: str, allowed: Iterable[str]) -> None:
    """Refuses a name that an option does not have.

    Raises:
        UserError: the value is not among the allowed ones.
    """
    names = [str(name) for name in allowed]
    if value not in names:
        raise UserError(f"{option}={value} does not exist; there are: {one_of(names)}")


def exit_with_message(command: Callable[[], None], *, debug: bool = False) -> NoReturn:
    """Runs a command and ends the process: 0, or one sentence on standard error and its code.

    With `debug` the traceback of a `UserError` is shown too.
    """
    warnings.formatwarning = _as_a_sentence
    try:
        command()
    except UserError as error:
        if debug:
            traceback.print_exc()
        _say(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _say("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away, as `head` does; nothing is left to tell it.
        _print_no_more()
        sys.exit(ExitCode.OK)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            # Files say so by their names: this is what is printed.
            _print_no_more()
            _say("there is no space left where the output goes; make room, or send it elsewhere")
            sys.exit(ExitCode.OUTPUT)
        traceback.print_exc()
        _say(f"internal error, please report it: {type(error).__name__}: {error}")
        sys.exit(ExitCode.INTERNAL)
    sys.exit(ExitCode.OK)


def _as_a_sentence(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """What protlm warns of is told to its users, without the place in the code."""
    if category is UserWarning and Path(filename).is_relative_to(Path(__file__).parent):
        return f"protlm: warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _print_no_more() -> None:
    """Lets go of standard output, which would fail again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str) -> None:
    print(f"protlm: {message}", file=sys.stderr)
