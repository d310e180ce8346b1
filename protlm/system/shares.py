"""Shares of a command's work: computed by processes of this machine, or by jobs of a cluster."""

import os
import pickle
import re
import shutil
import signal
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, Self, TypeVar

from protlm.system.errors import FULL_DISK, ExitCode, UserError, of_the_system, one_of
from protlm.system.interruption import interrupts_held
from protlm.system.lock import KILLED
from protlm.system.paths import explain_os_error, scratch_name
from protlm.system.terminal import watched

Tag = TypeVar("Tag")
Item = TypeVar("Item")
Result = TypeVar("Result")

_WORD = re.compile(r"[\w.:,@+-]{1,100}", re.ASCII)
# Settings of `--slurm`: submitit's name of each, and the type of its value.
_PARAMETERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "partition": ("slurm_partition", str),
    "time": ("slurm_time", str),
    "account": ("slurm_account", str),
    "qos": ("slurm_qos", str),
    "constraint": ("slurm_constraint", str),
    "mem_gb": ("mem_gb", float),
    "cpus": ("cpus_per_task", int),
    "gpus": ("gpus_per_node", int),
    "parallel": ("slurm_array_parallelism", int),
}
_TIMEOUT_MINUTES = 24 * 60
# A result, or the file of a large one. A process that is killed while it writes to a pipe may leave
# half of a result, and the executor would wait for the rest forever. So little is never divided.
_Pickled = bytes | Path
_WRITTEN_AT_ONCE = 2_048
# Items in memory beyond one for each process: keeps all of them busy.
_AHEAD = 4
# What a process that was started here applies.
_function: Callable[[Any], Any]


class ProcessDiedError(UserError):
    """Another process was killed, for instance when memory ran out, or does not respond."""

    exit_code = ExitCode.INTERNAL


@dataclass(frozen=True)
class Share:
    """The part of the work that one process does: parts number, number + count, ..."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `I/N`.

        >>> Share.parse("2/8")
        Share(number=2, count=8)
        """
        number, _, count = text.partition("/")
        numbers = number.isdecimal() and count.isdecimal() and len(text) < 20
        if numbers and 1 <= int(number) <= int(count):
            return cls(int(number), int(count))
        raise UserError(f"--shard {text} is not I/N with I from 1 to N; type for instance 1/4")

    def __contains__(self, part: object) -> bool:
        """Returns whether a part, counted from 0, belongs to this share."""
        return isinstance(part, int) and part % self.count == self.number - 1


class Executor(StrEnum):
    """What runs the jobs: a cluster, or processes of this machine."""

    SLURM = "slurm"
    LOCAL = "local"


@dataclass(frozen=True)
class Submission:
    """Options of jobs, each of which computes a share."""

    executor: Executor
    parameters: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, executor: Executor | None, settings: Sequence[str] | None) -> Self | None:
        """Parses `--executor` and `--slurm key=value`; None runs no jobs."""
        if settings and executor is not Executor.SLURM:
            given = "" if executor is None else f", not --executor {executor.value}"
            raise UserError(f"--slurm {settings[0]} requires --executor slurm{given}")
        if executor is None:
            return None
        parameters = dict(_parameter(setting) for setting in settings or ())
        if executor is Executor.SLURM:
            _submitit()
        return cls(executor, parameters)

    def run(
        self, function: Callable[[Item], Any], items: Sequence[Item], folder: Path, cores: int = 1
    ) -> None:
        """Applies a function to every item, each in a job; raises the error of a job that fails.

        Function and items are pickled. Jobs of a cluster keep in the folder what they print, and
        have this number of cores, unless the parameters have another. Processes of this machine
        keep their results beside it.
        """
        if self.executor is Executor.LOCAL:
            at_once = max(1, (os.cpu_count() or 1) // cores)
            results = here(function, items, at_once, "omit --executor", folder.parent)
        else:
            results = self._on_cluster(partial(_answer, function), items, folder, cores)
        for _ in watched("jobs", results, total=len(items)):
            pass

    def _on_cluster(
        self, function: Callable[[Item], Any], items: Sequence[Item], folder: Path, cores: int
    ) -> Iterator[Any]:
        submitit = _submitit()
        errors = submitit.core.utils
        executor = submitit.AutoExecutor(folder=folder, cluster=self.executor.value)
        defaults = {"timeout_min": _TIMEOUT_MINUTES, "cpus_per_task": cores}
        parameters = {"name": "protlm", **defaults, **self.parameters}
        # In SLURM 22.05 to 23.02, srun uses one core of the job unless the number is repeated.
        arguments = [f"--cpus-per-task={parameters['cpus_per_task']}"]
        executor.update_parameters(**parameters, slurm_srun_args=arguments)
        try:
            jobs = executor.map_array(function, items)
        except (errors.FailedJobError, errors.FailedSubmissionError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"the jobs could not be submitted: {reason:.500}") from error
        try:
            for job in jobs:
                yield _result(job, errors.UncompletedJobError)
        finally:
            for job in jobs:
                job.cancel()


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


def _answer(function: Callable[[Item], Result], item: Item) -> Result | UserError:
    """Applies the function in a job; returns the error of the user, if there is one."""
    try:
        return function(item)
    except UserError as error:
        return error
    except Exception as error:
        if (known := of_the_system(error)) is None:
            raise
        return known


def _result(job: Any, uncompleted: type[Exception]) -> Any:
    try:
        answer = job.result()
    except uncompleted:
        raise ProcessDiedError(
            f"a job ended prematurely; see {job.paths.stderr}, then type the same command again to "
            "resume"
        ) from None
    if isinstance(answer, UserError):
        raise answer
    return answer


def _submitit() -> ModuleType:
    """Returns submitit, on a machine that can submit jobs."""
    try:
        import submitit
    except ImportError:
        raise UserError(
            "--executor slurm needs submitit, which is not installed; type: pip install "
            "'protlm[cluster]'"
        ) from None
    if not (shutil.which("srun") and shutil.which("sbatch")):
        raise UserError(
            "--executor slurm needs srun and sbatch, which are not on the PATH here: run it on a "
            "machine of the cluster, or use --executor local"
        )
    return submitit


def _parameter(setting: str) -> tuple[str, Any]:
    key, _, value = setting.partition("=")
    if key not in _PARAMETERS:
        allowed = one_of(list(_PARAMETERS))
        raise UserError(f"--slurm {setting}: {key!r} is unknown; choose one of: {allowed}")
    name, kind = _PARAMETERS[key]
    try:
        if not _WORD.fullmatch(value):
            raise ValueError
        return name, kind(value)
    except ValueError:
        raise UserError(
            f"--slurm {setting} is not a value of {key}; for instance: partition=cpu time=12:00:00 "
            "mem_gb=8 cpus=4"
        ) from None


def in_order(
    function: Callable[[Item], Result],
    items: Iterator[tuple[Tag, Item]],
    num_workers: int,
    folder: Path,
) -> Generator[tuple[Tag, Result], None, None]:
    """Yields the result of the function for every item, with its tag, in the order of the items.

    A single worker is this process itself. Several workers are forked at the first item, so that
    they share the memory of the function. An error of the items follows the results before it.
    """
    if num_workers == 1:
        yield from ((tag, function(item)) for tag, item in items)
        return
    waiting: deque[tuple[Tag, Future[_Pickled]]] = deque()
    with processes(function, num_workers, "use fewer --workers", folder, forked=True) as submit:
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
    anew, and the function is pickled. The advice is for a lack of memory: "use fewer --workers".
    Large results go through a scratch folder in `folder`, which is that of the work, so that the
    next start of it removes what a kill left.
    """
    others = active_children()
    named = scratch_name("protlm-workers", folder)
    with tempfile.TemporaryDirectory(**named, ignore_cleanup_errors=True) as scratch:
        with _refusal_explained(count, advice):
            context = get_context("fork" if forked else "spawn")
            pool = ProcessPoolExecutor(count, context, _begin, (function, Path(scratch)))

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
    try:
        with tempfile.NamedTemporaryFile(dir=_folder, delete=False) as file:
            file.write(content)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise explain_os_error(error, _folder.parent) from error
    return Path(file.name)


def _loaded(pickled: "_Pickled") -> Any:
    """Returns a result; its file is in a folder of this process, and no other user writes there."""
    if isinstance(pickled, Path):
        path, pickled = pickled, pickled.read_bytes()
        path.unlink()
    return pickle.loads(pickled)  # noqa: S301
