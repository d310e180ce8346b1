"""Standard output and standard error of a command: a failed write to a log must not end the work.

Progress lines and warnings are discarded when their reader has exited or the disk is full.
"""

import io
import os
import select
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STDOUT, _STDERR = 1, 2


class _LossyStream(io.FileIO):
    """A stream that discards data that cannot be written."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            if written := super().write(data):
                return written
        except BrokenPipeError:
            # Libraries and child processes write to this descriptor too.
            discard(self.fileno())
        except OSError:
            pass
        return memoryview(data).nbytes


def protect_streams(*, result_on_stdout: bool) -> None:
    """Makes the standard streams of this process safe to write to.

    Streams that were replaced, for instance by a test runner, are left as they are. A closed
    descriptor is opened on the null device: otherwise the next file to be opened would get its
    number, and libraries would print into that file. Failed writes are ignored, unless they are of
    a result on standard output.
    """
    while (null := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        # Also for a program that replaces this process.
        os.set_inheritable(null, True)
    os.close(null)
    if sys.stdout is None or (sys.stdout is sys.__stdout__ and not result_on_stdout):
        sys.stdout = _lossy(_STDOUT, sys.stdout)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _lossy(_STDERR, sys.stderr)


def has_lost_reader() -> bool:
    """Returns whether the reader of standard output has exited, as `head` does."""
    ends = select.poll()
    ends.register(_STDOUT, 0)
    return bool(ends.poll(0))


def discard(descriptor: int) -> None:
    """Redirects a descriptor to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _lossy(descriptor: int, before: TextIO | None) -> TextIO:
    if before is not None:
        with suppress(OSError, ValueError):
            before.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LossyStream(descriptor, "w", closefd=False)),
        encoding=before.encoding if before is not None else "utf-8",
        errors=before.errors if before is not None else "backslashreplace",
        line_buffering=True,
    )
