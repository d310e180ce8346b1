"""Standard output and standard error of a command: a failed write to a log must not end the work.

A command whose result is read by a process that exits early, such as `head`, ends without an
error. Progress lines and warnings are discarded when their reader has exited or the disk is full.
"""

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STDOUT, _STDERR = 1, 2


class ReaderGoneError(BrokenPipeError):
    """The reader of standard output has exited, as `head` does when it has read enough."""


class _Stream(io.FileIO):
    """A standard stream of a command.

    Args:
        descriptor: its number.
        is_result: its data are the result of the command, so that a lost reader raises
            `ReaderGoneError`; otherwise they are discarded if they cannot be written.
    """

    def __init__(self, descriptor: int, *, is_result: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_result = is_result

    def write(self, data: "ReadableBuffer", /) -> int:
        """Writes some of `data`, or discards it."""
        try:
            written = super().write(data)
            if written is None:
                raise BlockingIOError("standard output accepts no data now")
            return written
        except BrokenPipeError as error:
            if self._is_result:
                raise ReaderGoneError(*error.args) from error
            # Libraries and child processes write to this descriptor too.
            discard(self.fileno())
        except OSError:
            if self._is_result:
                raise
        return memoryview(data).nbytes


def protect_streams(*, result_on_stdout: bool) -> None:
    """Makes the standard streams of this process safe to write to.

    Streams that were replaced, for instance by a test runner, are left as they are. A closed
    descriptor is opened on the null device: otherwise the next file to be opened would get its
    number, and libraries would print into that file.

    Args:
        result_on_stdout: the command prints its result: a lost reader raises `ReaderGoneError`.
            Otherwise failed writes are ignored, as on standard error.
    """
    while (null := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        # Also for a program that replaces this process.
        os.set_inheritable(null, True)
    os.close(null)
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Stream(_STDOUT, is_result=result_on_stdout), sys.stdout)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Stream(_STDERR, is_result=False), sys.stderr)


def discard(descriptor: int) -> None:
    """Redirects a descriptor to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _text(stream: _Stream, before: TextIO | None) -> TextIO:
    """Returns a text stream with the encoding of the one that it replaces."""
    if before is not None:
        with suppress(OSError, ValueError):
            before.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(stream),
        encoding=before.encoding if before is not None else "utf-8",
        errors=before.errors if before is not None else "backslashreplace",
        line_buffering=stream.fileno() == _STDERR or stream.isatty(),
    )
