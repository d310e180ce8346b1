"""A function applied to a stream by several processes, its results in the order of the stream."""

import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from protlm.errors import ExitCode, UserError

Tag = TypeVar("Tag")
Item = TypeVar("Item")
Result = TypeVar("Result")

# Items that wait beyond those in work: enough that no worker waits, few enough for the memory.
_AHEAD = 4
# The number of a slot, as the pipes carry it.
_NUMBER_BYTES = 4


class WorkerDiedError(UserError):
    """A worker process was killed, for instance by the system when the memory ran out."""

    exit_code = ExitCode.INTERNAL


def in_order(
    function: Callable[[Item], Result], items: Iterator[tuple[Tag, Item]], num_workers: int
) -> Iterator[tuple[Tag, Result]]:
    """Yields the function of every item, each with its tag, in the order of the items.

    One worker is this process itself; more are forked from it before the first item is drawn, so
    that whatever the function holds is shared and never copied.

    Raises:
        WorkerDiedError: a worker has died.
        Exception: what the function raises.
    """
    if num_workers == 1:
        yield from ((tag, function(item)) for tag, item in items)
        return
    crew = _Crew(function, num_workers)
    # Results are taken in order, so the slot that comes next is the one that is free.
    slots = cycle(range(crew.num_slots))
    waiting: deque[tuple[Tag, int]] = deque()
    try:
        crew.start()
        for tag, item in items:
            slot = next(slots)
            crew.begin(slot, item)
            waiting.append((tag, slot))
            if len(waiting) == crew.num_slots:
                yield _first(crew, waiting)
        while waiting:
            yield _first(crew, waiting)
    finally:
        crew.end()


def _first(crew: "_Crew[Item, Result]", waiting: deque[tuple[Tag, int]]) -> tuple[Tag, Result]:
    tag, slot = waiting.popleft()
    return tag, crew.finish(slot)


@dataclass(frozen=True)
class _Failure:
    """What the function raised."""

    error: Exception


class _Crew(Generic[Item, Result]):
    """Workers, and the slots through which they are given items and give back results.

    Whoever is free takes the next number of a slot from one pipe, and puts it into another when
    the result is there. The slots are made before the workers are forked, which so share them.
    """

    def __init__(self, function: Callable[[Item], Result], num_workers: int) -> None:
        self.num_slots = num_workers + _AHEAD
        self._slots = [_Slot() for _ in range(self.num_slots)]
        self._function = function
        self._finished: set[int] = set()
        self._to_do, self._begun = os.pipe()
        self._done, self._ended = os.pipe()
        context = multiprocessing.get_context("fork")
        self._workers = [
            context.Process(target=self._work, daemon=True) for _ in range(num_workers)
        ]
        self._started: list[BaseProcess] = []

    def start(self) -> None:
        """Forks the workers."""
        with warnings.catch_warnings():
            # Python 3.12 warns of forks where there are threads, as those of numpy's linear
            # algebra, which no worker uses.
            warnings.simplefilter("ignore", DeprecationWarning)
            for worker in self._workers:
                worker.start()
                self._started.append(worker)

    def begin(self, slot: int, item: Item) -> None:
        """Has a worker apply the function to the item; its result will be in the slot."""
        self._slots[slot].put(item)
        os.write(self._begun, slot.to_bytes(_NUMBER_BYTES))

    def finish(self, slot: int) -> Result:
        """Waits for the result in a slot, and takes it out.

        Raises:
            WorkerDiedError: a worker has died.
            Exception: what the function raised.
        """
        while slot not in self._finished:
            ready = wait([self._done, *(worker.sentinel for worker in self._started)])
            if self._done not in ready:
                raise WorkerDiedError(
                    "a worker process was killed, perhaps because the memory ran out; type the "
                    "same command again to go on from where it was, with fewer --workers if it "
                    "was the memory"
                )
            self._finished.add(int.from_bytes(os.read(self._done, _NUMBER_BYTES)))
        self._finished.remove(slot)
        result = self._slots[slot].take()
        if isinstance(result, _Failure):
            raise result.error
        return result

    def end(self) -> None:
        """Ends the workers, whatever they are at: nobody waits for it."""
        for worker in self._started:
            worker.kill()
        for worker in self._started:
            worker.join()
        for pipe in (self._to_do, self._begun, self._done, self._ended):
            os.close(pipe)
        for slot in self._slots:
            slot.close()

    def _work(self) -> None:
        """What a worker does: it leaves Ctrl-C to its parent, and ends with that."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A pipe ends when nobody is left who could write into it.
        os.close(self._begun)
        while number := os.read(self._to_do, _NUMBER_BYTES):
            slot = self._slots[int.from_bytes(number)]
            try:
                slot.put(self._function(slot.take()))
            except Exception as error:
                error.add_note(f"In a worker process:\n{traceback.format_exc()}")
                slot.put(_Failure(error))
            os.write(self._ended, number)


class _Slot:
    """Room in memory for an item or a result, which one process puts in and another takes out.

    A pipe holds 64 KiB: for a block of 4 MiB both its ends would have to wake up a hundred times.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("protlm")
        else:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())

    def put(self, content: object) -> None:
        os.lseek(self._file, 0, os.SEEK_SET)
        with os.fdopen(self._file, "wb", closefd=False) as file:
            pickle.dump(content, file, pickle.HIGHEST_PROTOCOL)

    def take(self) -> Any:
        os.lseek(self._file, 0, os.SEEK_SET)
        with os.fdopen(self._file, "rb", closefd=False) as file:
            # Nobody but this process and those it forked can write there.
            return pickle.load(file)  # noqa: S301

    def close(self) -> None:
        os.close(self._file)
