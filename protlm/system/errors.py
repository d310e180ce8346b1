"""The errors that a user can fix, and the exit code of each."""

import difflib
import errno
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NoReturn, Self

from protlm.system.streams import discard, has_lost_reader, protect_streams
from protlm.system.terminal import printable_lines


class ExitCode(IntEnum):
    """The exit status of a command."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    BAD_INPUT = 3
    OUTPUT = 4
    PREEMPTED = 75
    INTERRUPTED = 130


class UserError(Exception):
    """An error that the user can fix: a wrong path, key, option or setting.

    The message says in one or two sentences what was given and what is allowed. What to type is
    for the command to say: `options` are those that help, by the names of their fields, with a
    value, a word in capitals that stands for one, True for a switch, or None to leave it out.
    """

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, message: str = "", options: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.options = options or {}


class OptionError(UserError):
    """An impossible option of a mechanism.

    The sentence begins with the name of the option, or is a function of what stands before the
    names of options where they are set: nothing in Python, `attention.` in settings.
    """

    def __init__(self, sentence: str | Callable[[str], str]) -> None:
        self.sentence = sentence if callable(sentence) else lambda at: f"{at}{sentence}"
        super().__init__(self.sentence(""))

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        """Returns what another process makes the error of."""
        return type(self), (str(self),)

    def within(self, group: str) -> "OptionError":
        """Returns the error of an option that is in a group of options."""
        return OptionError(lambda at: self.sentence(f"{at}{group}."))


class InputDataError(UserError):
    """Invalid input data; the message names the file and, if possible, the line."""

    exit_code = ExitCode.BAD_INPUT


class OutputError(UserError):
    """An output that cannot be written: no space, no permission, or it exists already."""

    exit_code = ExitCode.OUTPUT


class TrainingDivergedError(UserError):
    """Too many skipped steps in a row; the run stops, and none of them is in a checkpoint."""

    exit_code = ExitCode.INTERNAL


class InterruptedJobError(UserError):
    """Ctrl-C or SIGTERM during a command that says how to continue."""

    exit_code = ExitCode.INTERRUPTED


# What allocators and loaders say; not all raise MemoryError.
_FULL_MEMORY = r"(?i)(can't|cannot|failed to|unable to) (allocate|map) |out of memory|enough memory"
_NO_PROCESS = os.strerror(errno.EAGAIN)
FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def is_full_memory(error: Exception) -> bool:
    """Returns whether an error says that the memory of a device is full or limited."""
    return isinstance(error, MemoryError) or bool(re.search(_FULL_MEMORY, str(error)))


def of_the_system(error: Exception) -> UserError | None:
    """Returns the sentence of a limit or a fault of the system, None for any other error.

    It is the last guard: where a file is read or written, a better sentence can be said.
    """
    text = str(error).split("\n", 1)[0][:200]
    if is_full_memory(error):
        more = "another device" if "CUDA" in text else "allow more memory (ulimit -v)"
        return UserError(
            f"the memory is full or limited ({text or 'MemoryError'}): use smaller batches, "
            f"shorter sequences or a smaller model, or {more}"
        )
    if "start new thread" in text or (isinstance(error, OSError) and text.endswith(_NO_PROCESS)):
        return UserError(f"{text}: allow more processes and threads (ulimit -u)")
    if isinstance(error, UnicodeEncodeError) and error.encoding != "utf-8":
        return OutputError(
            f"the encoding {error.encoding} has no {error.object[error.start : error.end][:9]!r}; "
            "type: export PYTHONIOENCODING=utf-8"
        )
    return _of_a_file(error) if isinstance(error, OSError) else None


def _of_a_file(error: OSError) -> UserError | None:
    # Errors of files contain their names.
    name, reason = error.filename, error.strerror or str(error)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return UserError(f"{reason}: allow more open files (ulimit -n)")
    if error.errno in FULL_DISK:
        return OutputError(f"{name or 'standard output'}: no space left; free some")
    if error.errno == errno.ENOENT and name is None and "temporary" in reason:
        return OutputError(f"{reason}; set TMPDIR to a folder that can be written to")
    if error.errno == errno.ENOENT and name is None and reason == os.strerror(errno.ENOENT):
        return UserError("the current folder was removed; change to another: cd FOLDER")
    if name is not None and error.errno in (errno.EEXIST, errno.EROFS, errno.ENOTEMPTY):
        return OutputError(f"{name} cannot be written: {reason}")
    # A file that is missing may be protlm's own.
    if name is not None and error.errno not in (None, errno.ENOENT):
        return InputDataError(f"{name} cannot be used: {reason}")
    return None


@contextmanager
def interrupt_explained(advice: str) -> Iterator[None]:
    """Turns Ctrl-C and SIGTERM in its block into an error with a sentence of advice."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedJobError(f"interrupted: {advice}") from None


def one_of(names: list[str]) -> str:
    """Formats alternatives for a message.

    >>> one_of(["b", "a"])
    'a, b'
    """
    return ", ".join(sorted(names)) if names else "(none)"


def did_you_mean(name: str, typed: Mapping[str, str]) -> str:
    """Returns a question that suggests similar names, or "" if none is similar.

    These are those that begin with it or else contain it, the shortest first, or the most similar.
    `typed` has the known names, and how each is typed.

    >>> did_you_mean("tyni", {"tiny": "model=tiny", "small": "model=small"})
    ' (did you mean model=tiny?)'
    >>> did_you_mean("ti", {"titan": "titan", "tiny": "tiny", "small": "small"})
    ' (did you mean tiny or titan?)'
    """
    part = name.lower()
    starting = [one for one in typed if part and one.startswith(part)]
    # Two letters are in many names.
    containing = [one for one in typed if len(part) > 2 and part in one]
    similar = sorted(starting or containing, key=lambda one: (len(one), one))
    # Two exchanged letters of four leave a similarity of a half.
    similar = similar or difflib.get_close_matches(name, typed, n=1, cutoff=0.5)
    return f" (did you mean {' or '.join(typed[one] for one in similar)}?)" if similar else ""


def refuse_unknown(option: str, value: str, allowed: Iterable[str]) -> None:
    """Refuses a value that is not among the allowed ones."""
    names = [str(name) for name in allowed]
    if value not in names:
        raise UserError(f"{option}={value} does not exist; there are: {one_of(names)}")


def exit_with_message(
    command: Callable[[], None], *, debug: bool = False, result_on_stdout: bool = True
) -> NoReturn:
    """Runs a command and exits: with 0, or with one sentence on standard error and its code.

    With `debug`, the traceback of a `UserError` is printed, too. A command that prints its result
    exits with 0 when the reader of standard output has closed it. Failed writes to standard error
    are always ignored.
    """
    protect_streams(result_on_stdout=result_on_stdout)
    warnings.formatwarning = _as_a_sentence
    sys.exit(_exit_code_of(command, debug=debug))


def _exit_code_of(command: Callable[[], None], *, debug: bool) -> ExitCode:
    try:
        command()
        if sys.stdout is not None:
            sys.stdout.flush()
    except UserError as error:
        if debug:
            traceback.print_exc()
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return ExitCode.INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and has_lost_reader():
            _discard_output()
            return ExitCode.OK
        known = of_the_system(error)
        if debug or known is None:
            traceback.print_exc()
        if known is not None:
            if isinstance(error, OSError) and error.filename is None:
                # It may be of standard output, and what is left of that would fail again.
                _discard_output()
            _say(str(known))
            return known.exit_code
        _say(f"internal error, please report it: {type(error).__name__}: {error}")
        return ExitCode.INTERNAL
    return ExitCode.OK


def _as_a_sentence(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    if category is UserWarning and Path(filename).is_relative_to(Path(__file__).parents[1]):
        return f"protlm: warning: {printable_lines(str(message))}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _discard_output() -> None:
    """Discards the buffered output, which would fail again when the process exits."""
    if sys.stdout is not None:
        discard(sys.stdout.fileno())


def _say(message: str) -> None:
    print(f"protlm: {printable_lines(message)}", file=sys.stderr)
