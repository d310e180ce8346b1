"""A function applied to a stream by several processes, its results in the order of the stream."""

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from data_prep.interruption import interrupts_held
from protlm.errors import ExitCode, UserError

Tag = TypeVar("Tag")
Item = TypeVar("Item")
Result = TypeVar("Result")

# Items that wait beyond those in work: enough that no worker waits, few enough for the memory.
_AHEAD = 4
# The number of a slot, as the pipes carry it.
_NUMBER_BYTES = 4
# What a slot keeps for the next content: two blocks, so that the usual ones cost no new pages.
_KEPT_BYTES = 8 << 20
# How long this process waits for a signal that its workers were given already.
_OWN_SIGNAL_SECONDS = 2.0


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
        UserError: the system does not give so many processes or open files.
        WorkerDiedError: a worker has died.
        Exception: what the function or the items raise, behind the results before.
    """
    if num_workers == 1:
        yield from ((tag, function(item)) for tag, item in items)
        return
    crew = _Crew(function, num_workers)
    # Results are taken in order, so the slot that comes next is the one that is free.
    slots = cycle(range(crew.num_slots))
    waiting: deque[tuple[Tag, int]] = deque()
    try:
        with _refusal_explained(num_workers):
            crew.start()
        for drawn in _and_error(items):
            if isinstance(drawn, Exception):
                yield from _rest(crew, waiting)
                raise drawn
            tag, item = drawn
            slot = next(slots)
            crew.begin(slot, item)
            waiting.append((tag, slot))
            if len(waiting) == crew.num_slots:
                yield _first(crew, waiting)
        yield from _rest(crew, waiting)
    finally:
        crew.end()


@contextmanager
def _refusal_explained(num_workers: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{num_workers} worker processes cannot be started ({error.strerror}): use fewer "
            "--workers, or allow more processes and open files (ulimit -u, ulimit -n)"
        ) from error


def _and_error(items: Iterator[tuple[Tag, Item]]) -> Iterator[tuple[Tag, Item] | Exception]:
    """The items, and the error in drawing one: as with one worker, what came before it is first."""
    try:
        yield from items
    except Exception as error:
        yield error


def _first(crew: "_Crew[Item, Result]", waiting: deque[tuple[Tag, int]]) -> tuple[Tag, Result]:
    tag, slot = waiting.popleft()
    return tag, crew.finish(slot)


def _death(dead: list[BaseProcess]) -> WorkerDiedError:
    """What is to be told of workers that have died.

    Clusters end the processes of a job one by one: where a worker was told to end, this process
    soon is too, and what listens to that signal here says it better.
    """
    for worker in dead:
        worker.join()
    again = "type the same command again to go on from where it was"
    if any(worker.exitcode == -signal.SIGTERM for worker in dead):
        time.sleep(_OWN_SIGNAL_SECONDS)
        return WorkerDiedError(f"a worker process was told to end (SIGTERM); {again}")
    return WorkerDiedError(
        f"a worker process was killed, perhaps because the memory ran out; {again}, with fewer "
        "--workers if it was the memory"
    )


def _rest(
    crew: "_Crew[Item, Result]", waiting: deque[tuple[Tag, int]]
) -> Iterator[tuple[Tag, Result]]:
    while waiting:
        yield _first(crew, waiting)


@dataclass(frozen=True)
class _Failure:
    """What the function raised."""

    error: Exception


def _as_it_can_be_handed_over(error: Exception) -> Exception:
    """The error, or what it says where another process could not be given it."""
    try:
        # Many an exception can be pickled, but not be made again of its message alone.
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _Crew(Generic[Item, Result]):
    """Workers, and the slots through which they are given items and give back results.

    Whoever is free takes the next number of a slot from one pipe, and puts it into another when
    the result is there. The slots are made before the workers are forked, which so share them.
    """

    def __init__(self, function: Callable[[Item], Result], num_workers: int) -> None:
        self.num_slots = num_workers + _AHEAD
        self._function, self._num_workers = function, num_workers
        self._finished: set[int] = set()
        self._slots: list[_Slot] = []
        self._workers: list[BaseProcess] = []
        self._closing = ExitStack()

    def start(self) -> None:
        """Opens the slots and the pipes, and forks the workers.

        Raises:
            OSError: the system does not give so many processes or open files.
        """
        for _ in range(self.num_slots):
            self._slots.append(_Slot())
            self._closing.callback(self._slots[-1].close)
        self._to_do, self._begun = self._pipe()
        self._done, self._ended = self._pipe()
        context = multiprocessing.get_context("fork")
        with warnings.catch_warnings():
            # Python 3.12 warns of forks where there are threads, as those of numpy's linear
            # algebra, which no worker uses.
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in range(self._num_workers):
                worker = context.Process(target=self._work, daemon=True)
                # A signal in a child that is not yet a worker would unwind its parent's stack
                # there, with all that cleans up behind it.
                with interrupts_held():
                    worker.start()
                    self._workers.append(worker)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        for end in ends:
            self._closing.callback(os.close, end)
        return ends

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
            ready = wait([self._done, *(worker.sentinel for worker in self._workers)])
            if self._done not in ready:
                raise _death([worker for worker in self._workers if worker.sentinel in ready])
            self._finished.add(int.from_bytes(os.read(self._done, _NUMBER_BYTES)))
        self._finished.remove(slot)
        result = self._slots[slot].take()
        if isinstance(result, _Failure):
            raise result.error
        return result

    def end(self) -> None:
        """Ends the workers, whatever they are at: nobody waits for it."""
        with interrupts_held(), self._closing:
            for worker in self._workers:
                worker.kill()
            for worker in self._workers:
                worker.join()

    def _work(self) -> None:
        """What a worker does: it leaves Ctrl-C and all else to its parent, and ends with that."""
        # A cluster gives a signal to all processes of a job, and what it is to set going, such as
        # submitit's end of a job whose time is over, is for one of them.
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A pipe ends when nobody is left who could write into it.
        os.close(self._begun)
        while number := os.read(self._to_do, _NUMBER_BYTES):
            slot = self._slots[int.from_bytes(number)]
            try:
                slot.put(self._function(slot.take()))
            except Exception as error:
                failure = _as_it_can_be_handed_over(error)
                failure.add_note(f"In a worker process:\n{traceback.format_exc()}")
                slot.put(_Failure(failure))
            os.write(self._ended, number)


class _Slot:
    """Room in memory for an item or a result, which one process puts in and another takes out.

    A pipe holds 64 KiB: for a block of 4 MiB both its ends would have to wake up a hundred times.
    """

    def __init__(self) -> None:
        try:
            self._file = os.memfd_create("protlm")
        except (AttributeError, OSError):
            # Only Linux knows it, and a hardened one (vm.memfd_noexec=2) refuses it.
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())

    def put(self, content: object) -> None:
        os.lseek(self._file, 0, os.SEEK_SET)
        with os.fdopen(self._file, "wb", closefd=False) as file:
            pickle.dump(content, file, pickle.HIGHEST_PROTOCOL)
            # Else every slot would keep the memory of the largest content that it ever had.
            file.truncate(max(file.tell(), _KEPT_BYTES))

    def take(self) -> Any:
        os.lseek(self._file, 0, os.SEEK_SET)
        with os.fdopen(self._file, "rb", closefd=False) as file:
            # Nobody but this process and those it forked can write there.
            return pickle.load(file)  # noqa: S301

    def close(self) -> None:
        os.close(self._file)
