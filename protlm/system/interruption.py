"""Handling of Ctrl-C and of SIGTERM, by which clusters end jobs, so that locks are released."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raises `KeyboardInterrupt` in its block when the process receives SIGTERM.

    A process that is killed leaves its lock file, which the resumed job cannot judge on another
    machine. Only the main thread can handle signals; in other threads nothing is changed.
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
def sigint_for_children() -> Iterator[None]:
    """Lets the processes that start in the block receive SIGINT, even if this one ignores it.

    A shell script that starts a command in the background has it ignore SIGINT, and so would its
    children, which are canceled by this signal. A handler, unlike SIG_IGN, is not inherited.
    """
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    if not ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM until the end of the block.

    Handlers record the signals. Blocking them would not suffice: a signal mask belongs to one
    thread, and the system delivers a signal to any thread that accepts it.
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
