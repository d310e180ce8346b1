"""Forked processes that are killed, for the programs that look at what they leave."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

# The owner of a function, and its name.
Call = tuple[Any, str]


def in_child(action: Callable[..., Any], *arguments: Any) -> int:
    """Forks a child with a process group of its own, which calls a function; returns its ID."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        action(*arguments)
        os._exit(0)
    return child


def status_of(child: int) -> int:
    """Waits for a child, which succeeds or is killed; returns 0 or the number of the signal."""
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status


def killed_at_each_call(
    calls: Sequence[Call], action: Callable[..., Any], *arguments: Any
) -> Iterator[int]:
    """Kills a child before its first call, after its second, before its third, and so on.

    Yields the number of the call, until a child ends first.
    """
    for number in count(1):
        status = status_of(in_child(_act_and_die, number, calls, action, *arguments))
        yield number
        if status == 0:
            return


def _act_and_die(
    number: int, calls: Sequence[Call], action: Callable[..., Any], *arguments: Any
) -> None:
    numbers = count(1)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_kill(*given: Any, **named: Any) -> Any:
            this = next(numbers)
            if this == number and number % 2 == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*given, **named)
            finally:
                if this == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call_and_kill

    for owner, name in calls:
        setattr(owner, name, counted(getattr(owner, name)))
    action(*arguments)
