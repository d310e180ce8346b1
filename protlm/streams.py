"""Standard output and standard error of a command: a failed write to a log must not end the work.

A command whose result is read by a process that exits early, such as `head`, ends without an
error. Progress lines and warnings are discarded when their reader has exited or the disk is full.
"""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STDIN, STDOUT, STDERR = 0, 1, 2


class ReaderGoneError(BrokenPipeError):
    """The reader of standard output has exited, as `head` does when it has read enough."""


class _ResultStream(io.FileIO):
    """The standard output of a command that prints its result."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Writes; a lost reader raises an error that differs from those of other broken pipes."""
        try:
            return super().write(data)
        except BrokenPipeError as error:
            raise ReaderGoneError(*error.args) from error


class _LossyStream(io.FileIO):
    """A stream that discards data that cannot be written."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Writes all of `data` or discards the rest; never fails."""
        rest = memoryview(data).cast("B")
        try:
            while len(rest):
                rest = rest[super().write(rest) or 0 :]
        except OSError as error:
            if error.errno == errno.EPIPE:
                # Libraries and child processes write to this descriptor too.
                discard(self.fileno())
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
    for descriptor in (STDIN, STDOUT, STDERR):
        _reserve(descriptor)
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        kind = _ResultStream if result_on_stdout else _LossyStream
        sys.stdout = _text(io.BufferedWriter(kind(STDOUT, "w", closefd=False)), sys.stdout)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _text(_LossyStream(STDERR, "w", closefd=False), sys.stderr)


def discard(descriptor: int) -> None:
    """Redirects a descriptor to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _reserve(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        null = os.open(os.devnull, os.O_RDONLY if descriptor == STDIN else os.O_WRONLY)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
        # Also for a program that replaces this process.
        os.set_inheritable(descriptor, True)


def _text(binary: IO[bytes], before: TextIO | None) -> TextIO:
    """Returns a text stream with the encoding of the one that it replaces."""
    is_unbuffered = isinstance(binary, io.FileIO)
    if before is not None:
        with suppress(OSError, ValueError):
            before.flush()
    return io.TextIOWrapper(
        binary,
        encoding=before.encoding if before is not None else "utf-8",
        errors=before.errors if before is not None else "backslashreplace",
        line_buffering=is_unbuffered or binary.isatty(),
        write_through=is_unbuffered,
    )
