"""A function in several processes of this machine, which end with the one that started them."""

import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

from protlm.system.errors import ExitCode, UserError
from protlm.system.interruption import interrupts_held

Tag = TypeVar("Tag")
Item = TypeVar("Item")
Result = TypeVar("Result")

# Items in memory beyond one for each process: keeps all of them busy.
_AHEAD = 4
# What a process that was started here applies.
_function: Callable[[Any], Any]


class ProcessDiedError(UserError):
    """A process was killed, for instance by the system when memory ran out."""

    exit_code = ExitCode.INTERNAL


def in_order(
    function: Callable[[Item], Result], items: Iterator[tuple[Tag, Item]], num_workers: int
) -> Generator[tuple[Tag, Result], None, None]:
    """Yields the result of the function for every item, with its tag, in the order of the items.

    A single worker is this process itself. Several workers are forked at the first item, so that
    they share the memory of the function. An error of the items follows the results before it.
    """
    if num_workers == 1:
        yield from ((tag, function(item)) for tag, item in items)
        return
    waiting: deque[tuple[Tag, Future[Result]]] = deque()
    with processes(function, num_workers, "use fewer --workers", forked=True) as submit:
        for submitted in _submitted(items, submit):
            waiting.append(submitted)
            if len(waiting) == num_workers + _AHEAD:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)


def _submitted(
    items: Iterator[tuple[Tag, Item]], submit: Callable[[Item], Future[Result]]
) -> Iterator[tuple[Tag, Future[Result]]]:
    """Yields the future of each item; the last one may be that of an error of the items."""
    tag: Any = None
    try:
        for tag, item in items:
            yield tag, submit(item)
    except Exception as error:
        failed = Future[Result]()
        failed.set_exception(error)
        yield tag, failed


def _first(waiting: deque[tuple[Tag, Future[Result]]]) -> tuple[Tag, Result]:
    tag, future = waiting.popleft()
    return tag, future.result()


@contextmanager
def processes(
    function: Callable[[Item], Result], count: int, advice: str, *, forked: bool = False
) -> Iterator[Callable[[Item], Future[Result]]]:
    """Yields a function that passes an item to one of several processes, which apply `function`.

    They ignore Ctrl-C, SIGTERM and the signals that this process handles, and are killed at the end
    of the block, or when this process dies.

    Args:
        function: what they apply.
        count: number of processes.
        advice: what to do if there is not enough memory for them: "use fewer --workers".
        forked: they are forks, which share the memory of the function; others start anew, and the
            function is pickled.
    """
    others = active_children()
    with _refusal_explained(count, advice):
        context = get_context("fork" if forked else "spawn")
        pool = ProcessPoolExecutor(count, context, _begin, (function,))

    def submit(item: Item) -> Future[Result]:
        # The first items start the processes. A signal to a fork that is not yet in `_begin` would
        # unwind a copy of this process's stack, and run its cleanup.
        with _refusal_explained(count, advice), interrupts_held(), warnings.catch_warnings():
            # Python 3.12 warns of forks in processes with threads. The threads here are those of
            # numpy's linear algebra, which no worker uses.
            warnings.simplefilter("ignore", DeprecationWarning)
            return pool.submit(_apply, item)

    try:
        yield submit
    except BrokenProcessPool as error:
        if error.__cause__ is not None:
            # No process died: an error of one cannot be unpickled here.
            raise
        raise ProcessDiedError(
            "a process was killed, perhaps because memory ran out; type the same command again to "
            f"resume, and if it was, {advice}"
        ) from error
    finally:
        with interrupts_held():
            mine = [process for process in active_children() if process not in others]
            for process in mine:
                process.kill()
            pool.shutdown(cancel_futures=True)
            for process in mine:
                process.join()


@contextmanager
def _refusal_explained(count: int, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{count} worker processes cannot be started ({error.strerror}): {advice}, or allow "
            "more processes and open files (ulimit -u, ulimit -n)"
        ) from error


def _begin(function: Callable[[Any], Any]) -> None:
    """Prepares a process, of whose signals its parent takes care."""
    global _function
    _function = function
    # A cluster sends signals to all processes of a job, but only one of them must handle them, for
    # instance when submitit ends a job at its time limit.
    for number in signal.valid_signals():
        if number == signal.SIGTERM or callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(ExitCode.INTERNAL)


def _apply(item: Any) -> Any:
    return _function(item)
