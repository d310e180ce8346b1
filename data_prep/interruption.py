"""SIGTERM, by which clusters end jobs, taken for Ctrl-C: locks are given back before the end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raises `KeyboardInterrupt` in its block when the process is told to end.

    The lock of a process that ends without a word stays, and on another machine, where the job
    may go on, nobody can know that it is dead. Only the main thread can listen to signals; in
    another one nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
