"""Handling of Ctrl-C and of SIGTERM, by which clusters end jobs, so that locks are released."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any


@contextmanager
def handled(
    numbers: Sequence[int], handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    """Handles signals in its block, in the main thread: others cannot."""
    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                before[number] = signal.getsignal(number)
                signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            # None means that the handler was not set from Python.
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


def sigterm_as_interrupt() -> AbstractContextManager[None]:
    """Raises `KeyboardInterrupt` in its block when the process receives SIGTERM.

    A process that is killed leaves its lock file, which the resumed job cannot judge on another
    machine.
    """
    return handled([signal.SIGTERM], signal.default_int_handler)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM until the end of the block.

    Handlers record the signals. Blocking them would not suffice: a signal mask belongs to one
    thread, and the system delivers a signal to any thread that accepts it.
    """
    came: list[int] = []
    try:
        with handled([signal.SIGINT, signal.SIGTERM], lambda number, frame: came.append(number)):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)
