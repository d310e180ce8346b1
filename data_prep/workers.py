"""A function applied to a stream by several processes, its results in the order of the stream."""

import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from protlm.errors import ExitCode, UserError

Tag = TypeVar("Tag")
Item = TypeVar("Item")
Result = TypeVar("Result")

# Items that wait beyond those in work: enough that no worker waits, few enough for the memory.
_AHEAD = 4


class WorkerDiedError(UserError):
    """A worker process was killed, for instance by the system when the memory ran out."""

    exit_code = ExitCode.INTERNAL


def in_order(
    function: Callable[[Item], Result], items: Iterator[tuple[Tag, Item]], num_workers: int
) -> Iterator[tuple[Tag, Result]]:
    """Yields the function of every item, each with its tag, in the order of the items.

    One worker is this process itself; more are forked from it when the first item is there, so
    that whatever the function holds is shared and never copied.

    Raises:
        WorkerDiedError: a worker has died.
        Exception: what the function raises.
    """
    if num_workers == 1:
        yield from ((tag, function(item)) for tag, item in items)
        return
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_begin,
        initargs=(function,),
    )
    waiting: deque[tuple[Tag, Future[Result]]] = deque()
    try:
        for tag, item in items:
            waiting.append((tag, _submit(pool, item)))
            if len(waiting) > num_workers + _AHEAD:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)
    except BrokenProcessPool:
        raise WorkerDiedError(
            "a worker process was killed, perhaps because the memory ran out; type the same "
            "command again to go on from where it was, with fewer --workers if it was the memory"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _first(waiting: "deque[tuple[Tag, Future[Result]]]") -> tuple[Tag, Result]:
    tag, future = waiting.popleft()
    return tag, future.result()


def _submit(pool: ProcessPoolExecutor, item: Any) -> "Future[Any]":
    with warnings.catch_warnings():
        # Python 3.12 warns of forks where there are threads, as those of numpy's linear algebra,
        # which no worker uses.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pool.submit(_work, item)


_function: Callable[[Any], Any] | None = None


def _begin(function: Callable[[Any], Any]) -> None:
    """Makes this process a worker: it leaves Ctrl-C to its parent, and ends with that."""
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A broken pool ends its other workers so.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(item: Any) -> Any:
    assert _function is not None
    return _function(item)
