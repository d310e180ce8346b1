"""Ctrl-C, and SIGTERM by which clusters end jobs: locks are given back before the end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


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


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Has Ctrl-C and SIGTERM wait for the end of the block.

    They are noted in place of what they would do. To block them would not do: a mask is one
    thread's own, and the system gives a signal to any thread that takes it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.getsignal(number)
            signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in came:
            signal.raise_signal(number)
