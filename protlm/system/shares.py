"""Shares of a command's work, computed by processes of this machine."""

import os
import pickle
import shutil
import signal
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from protlm.system.errors import FULL_DISK, ExitCode, UserError
from protlm.system.interruption import interrupts_held
from protlm.system.lock import KILLED
from protlm.system.paths import failures_explained, scratch_name

Tag = TypeVar("Tag")
Item = TypeVar("Item")
Result = TypeVar("Result")

# A result, or the file of a large one. A process that is killed while it writes to a pipe may leave
# half of a result, and the executor would wait for the rest forever. A pipe takes this many bytes
# at once or not at all.
_Pickled = bytes | Path
_WRITTEN_AT_ONCE = 2_048
# Items in memory beyond one for each process: keeps all of them busy.
_AHEAD = 4
# What a process that was started here applies.
_function: Callable[[Any], Any]


class ProcessDiedError(UserError):
    """Another process was killed, for instance when memory ran out, or does not respond."""

    exit_code = ExitCode.INTERNAL


def here(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    at_once: int,
    advice: str,
    folder: Path,
) -> Iterator[Result]:
    """Yields results in any order, computed by processes here, to which function and items go."""
    with processes(function, min(at_once, len(items)), advice, folder) as submit:
        for future in as_completed([submit(item) for item in items]):
            yield _loaded(future.result())


def in_order(
    function: Callable[[Item], Result],
    items: Iterator[tuple[Tag, Item]],
    num_workers: int,
    folder: Path,
    advice: str = "use fewer processes",
) -> Generator[tuple[Tag, Result], None, None]:
    """Yields the result of the function for every item, with its tag, in the order of the items.

    A single worker is this process itself. Several workers are forked at the first item, so that
    they share the memory of the function. An error of the items follows the results before it.
    """
    if num_workers == 1:
        yield from ((tag, function(item)) for tag, item in items)
        return
    waiting: deque[tuple[Tag, Future[_Pickled]]] = deque()
    with processes(function, num_workers, advice, folder, forked=True) as submit:
        for submitted in _submitted(items, submit):
            waiting.append(submitted)
            if len(waiting) == num_workers + _AHEAD:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)


def _submitted(
    items: Iterator[tuple[Tag, Item]], submit: Callable[[Item], "Future[_Pickled]"]
) -> Iterator[tuple[Tag, "Future[_Pickled]"]]:
    """Yields the future of each item; the last one may be that of an error of the items."""
    tag: Any = None
    try:
        for tag, item in items:
            yield tag, submit(item)
    except Exception as error:
        failed = Future[_Pickled]()
        failed.set_exception(error)
        yield tag, failed


def _first(waiting: "deque[tuple[Tag, Future[_Pickled]]]") -> tuple[Tag, Any]:
    tag, future = waiting.popleft()
    return tag, _loaded(future.result())


@contextmanager
def processes(
    function: Callable[[Item], Any],
    count: int,
    advice: str,
    folder: Path,
    *,
    forked: bool = False,
) -> "Iterator[Callable[[Item], Future[_Pickled]]]":
    """Yields a function that passes an item to one of several processes, which apply `function`.

    They ignore Ctrl-C, SIGTERM and the signals that this process handles, and are killed at the end
    of the block, or when this process dies. Forks share the memory of the function; others start
    anew, and the function is pickled. The advice is for a lack of memory: "use fewer processes".
    Large results go through a scratch folder in `folder`, which is that of the work, so that the
    next start of it removes what a kill left.
    """
    others = active_children()
    named = scratch_name("protlm-workers", folder)
    with tempfile.TemporaryDirectory(**named, ignore_cleanup_errors=True) as scratch:
        with _refusal_explained(count, advice):
            pool = ProcessPoolExecutor(
                count,
                get_context("fork" if forked else "spawn"),
                _begin,
                (function, Path(scratch)),
            )

        def submit(item: Item) -> Future[_Pickled]:
            # The first items start the processes. A signal to a fork that is not yet in `_begin`
            # would unwind a copy of this process's stack, and run its cleanup.
            with _refusal_explained(count, advice), interrupts_held(), warnings.catch_warnings():
                # Python 3.12 warns of forks in processes with threads. The threads here are those
                # of numpy's linear algebra, which no worker uses.
                warnings.simplefilter("ignore", DeprecationWarning)
                return pool.submit(_apply, item)

        try:
            yield submit
        except BrokenProcessPool as error:
            if error.__cause__ is not None:
                # No process died: an error of one cannot be unpickled here.
                raise
            raise ProcessDiedError(
                "a process was killed, perhaps because memory ran out; type the same command again "
                f"to resume, and if it was, {advice}"
            ) from error
        finally:
            with interrupts_held():
                mine = [process for process in active_children() if process not in others]
                for process in mine:
                    process.kill()
                pool.shutdown(cancel_futures=True)
                for process in mine:
                    process.join()
                KILLED.update(process.pid for process in mine if process.pid is not None)
                shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _refusal_explained(count: int, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{count} worker processes cannot be started ({error.strerror}): {advice}, or allow "
            "more processes and open files (ulimit -u, ulimit -n)"
        ) from error


def _begin(function: Callable[[Any], Any], folder: Path) -> None:
    """Prepares a process, of whose signals its parent takes care."""
    global _function, _folder
    _function, _folder = function, folder
    # A cluster sends signals to all processes of a job, but only one of them must handle them, for
    # instance when submitit ends a job at its time limit.
    for number in signal.valid_signals():
        if number == signal.SIGTERM or callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    end_with_parent(lambda: shutil.rmtree(_folder, ignore_errors=True))


def end_with_parent(clean: Callable[[], object] = lambda: None) -> None:
    """Ends this process, after `clean`, when the one that it works for ends, even by a kill."""

    def wait() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        clean()
        os._exit(ExitCode.INTERNAL)

    Thread(target=wait, daemon=True).start()


def _apply(item: Any) -> "_Pickled":
    content = pickle.dumps(_function(item), pickle.HIGHEST_PROTOCOL)
    if len(content) <= _WRITTEN_AT_ONCE:
        return content
    with (
        failures_explained(_folder.parent, FULL_DISK),
        tempfile.NamedTemporaryFile(dir=_folder, delete=False) as file,
    ):
        file.write(content)
    return Path(file.name)


def _loaded(pickled: "_Pickled") -> Any:
    """Returns a result; its file is in a folder of this process, and no other user writes there."""
    if isinstance(pickled, Path):
        path, pickled = pickled, pickled.read_bytes()
        path.unlink()
    return pickle.loads(pickled)  # noqa: S301
