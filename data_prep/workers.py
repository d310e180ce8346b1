"""Applies a function to a stream in several processes, with results in order."""

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

from protlm.system.errors import ExitCode, UserError
from protlm.system.interruption import interrupts_held

Tag = TypeVar("Tag")
Item = TypeVar("Item")
Result = TypeVar("Result")

# Items queued beyond those being processed: keeps all workers busy and memory bounded.
_AHEAD = 4
# Size of the number of a buffer in the pipes.
_NUMBER_BYTES = 4
# Memory that a buffer keeps: two blocks, so that usual contents need no new pages.
_KEPT_BYTES = 8 << 20
# How long this process waits for a signal that its workers have already received.
_OWN_SIGNAL_SECONDS = 2.0


class WorkerDiedError(UserError):
    """A worker process was killed, for instance by the system when memory ran out."""

    exit_code = ExitCode.INTERNAL


def in_order(
    function: Callable[[Item], Result], items: Iterator[tuple[Tag, Item]], num_workers: int
) -> Iterator[tuple[Tag, Result]]:
    """Yields the result of the function for every item, with its tag, in the order of the items.

    A single worker is this process itself. Several workers are forked before the first item is
    read, so that they share the memory of the function.
    """
    if num_workers == 1:
        yield from ((tag, function(item)) for tag, item in items)
        return
    pool = _WorkerPool(function, num_workers)
    # Results are taken in order, so the next buffer in the cycle is always free.
    buffers = cycle(range(pool.num_buffers))
    waiting: deque[tuple[Tag, int]] = deque()
    try:
        with _refusal_explained(num_workers):
            pool.start()
        for drawn in _and_error(items):
            if isinstance(drawn, Exception):
                yield from _rest(pool, waiting)
                raise drawn
            tag, item = drawn
            buffer = next(buffers)
            pool.begin(buffer, item)
            waiting.append((tag, buffer))
            if len(waiting) == pool.num_buffers:
                yield _first(pool, waiting)
        yield from _rest(pool, waiting)
    finally:
        pool.end()


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
    """Yields the items and then any exception, so that earlier results are yielded before it."""
    try:
        yield from items
    except Exception as error:
        yield error


def _first(
    pool: "_WorkerPool[Item, Result]", waiting: deque[tuple[Tag, int]]
) -> tuple[Tag, Result]:
    tag, buffer = waiting.popleft()
    return tag, pool.finish(buffer)


def _death(dead: list[BaseProcess]) -> WorkerDiedError:
    """Returns the error for workers that died.

    Clusters terminate the processes of a job one by one: after a SIGTERM to a worker, this process
    waits for its own, whose handler gives a better message.
    """
    for worker in dead:
        worker.join()
    again = "type the same command again to resume"
    if any(worker.exitcode == -signal.SIGTERM for worker in dead):
        time.sleep(_OWN_SIGNAL_SECONDS)
        return WorkerDiedError(f"a worker process was terminated (SIGTERM); {again}")
    return WorkerDiedError(
        f"a worker process was killed, perhaps because memory ran out; {again}, with fewer "
        "--workers if it was"
    )


def _rest(
    pool: "_WorkerPool[Item, Result]", waiting: deque[tuple[Tag, int]]
) -> Iterator[tuple[Tag, Result]]:
    while waiting:
        yield _first(pool, waiting)


@dataclass(frozen=True)
class _Failure:
    """An exception of the function."""

    error: Exception


def _picklable(error: Exception) -> Exception:
    """Returns the error, or a RuntimeError with its message if it cannot be pickled."""
    try:
        # Some exceptions can be pickled but not reconstructed from their arguments.
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _WorkerPool(Generic[Item, Result]):
    """Workers, and the shared buffers that carry items to them and results back.

    A free worker reads the number of a buffer from one pipe, and writes it to another pipe when
    the result is in the buffer. The workers inherit the buffers when they are forked.
    """

    def __init__(self, function: Callable[[Item], Result], num_workers: int) -> None:
        self.num_buffers = num_workers + _AHEAD
        self._function, self._num_workers = function, num_workers
        self._finished: set[int] = set()
        self._buffers: list[_SharedBuffer] = []
        self._workers: list[BaseProcess] = []
        self._closing = ExitStack()

    def start(self) -> None:
        """Opens the buffers and the pipes, and forks the workers."""
        for _ in range(self.num_buffers):
            self._buffers.append(_SharedBuffer())
            self._closing.callback(self._buffers[-1].close)
        self._to_do, self._begun = self._pipe()
        self._done, self._ended = self._pipe()
        context = multiprocessing.get_context("fork")
        with warnings.catch_warnings():
            # Python 3.12 warns of forks in processes with threads. The threads here are those of
            # numpy's linear algebra, which no worker uses.
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in range(self._num_workers):
                worker = context.Process(target=self._work, daemon=True)
                # A signal to a child that is not yet a worker would unwind a copy of the parent's
                # stack, and run the parent's cleanup.
                with interrupts_held():
                    worker.start()
                    self._workers.append(worker)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        for end in ends:
            self._closing.callback(os.close, end)
        return ends

    def begin(self, buffer: int, item: Item) -> None:
        """Passes an item to a worker, which replaces it in the buffer by the result."""
        self._buffers[buffer].put(item)
        os.write(self._begun, buffer.to_bytes(_NUMBER_BYTES))

    def finish(self, buffer: int) -> Result:
        """Waits for the result in a buffer, and returns it."""
        while buffer not in self._finished:
            ready = wait([self._done, *(worker.sentinel for worker in self._workers)])
            if self._done not in ready:
                raise _death([worker for worker in self._workers if worker.sentinel in ready])
            self._finished.add(int.from_bytes(os.read(self._done, _NUMBER_BYTES)))
        self._finished.remove(buffer)
        result = self._buffers[buffer].take()
        if isinstance(result, _Failure):
            raise result.error
        return result

    def end(self) -> None:
        """Kills the workers and closes pipes and buffers."""
        with interrupts_held(), self._closing:
            for worker in self._workers:
                worker.kill()
            for worker in self._workers:
                worker.join()

    def _work(self) -> None:
        """Runs in a worker, which ignores signals that its parent handles, and ends with it."""
        # A cluster sends signals to all processes of a job, but only one of them must handle them,
        # for instance when submitit ends a job at its time limit.
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A pipe ends when all its writers are closed.
        os.close(self._begun)
        while number := os.read(self._to_do, _NUMBER_BYTES):
            buffer = self._buffers[int.from_bytes(number)]
            try:
                buffer.put(self._function(buffer.take()))
            except Exception as error:
                failure = _picklable(error)
                failure.add_note(f"In a worker process:\n{traceback.format_exc()}")
                try:
                    buffer.put(_Failure(failure))
                except Exception:
                    # No memory or disk for it: the process that waits says that this one died.
                    os._exit(ExitCode.INTERNAL)
            os.write(self._ended, number)


class _SharedBuffer:
    """Shared memory for an item or a result, written by one process and read by another.

    A pipe holds only 64 KiB, so a block of 4 MiB would wake up both of its ends a hundred times.
    """

    def __init__(self) -> None:
        try:
            self._file = os.memfd_create("protlm")
        except (AttributeError, OSError):
            # Only Linux has memfd_create, and hardened systems (vm.memfd_noexec=2) refuse it.
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())

    def put(self, content: object) -> None:
        os.lseek(self._file, 0, os.SEEK_SET)
        with os.fdopen(self._file, "wb", closefd=False) as file:
            pickle.dump(content, file, pickle.HIGHEST_PROTOCOL)
            # Without this, every buffer would keep the memory of its largest content.
            file.truncate(max(file.tell(), _KEPT_BYTES))

    def take(self) -> Any:
        os.lseek(self._file, 0, os.SEEK_SET)
        with os.fdopen(self._file, "rb", closefd=False) as file:
            # Only this process and its forks can write there.
            return pickle.load(file)  # noqa: S301

    def close(self) -> None:
        os.close(self._file)
