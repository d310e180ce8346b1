"""Jobs on SLURM or as local processes."""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from shutil import which
from typing import Any, Protocol, Self

from protlm.system.errors import ExitCode, InputDataError, OutputError, UserError, one_of
from protlm.system.interruption import sigint_for_children
from protlm.system.terminal import JobProgress

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
_POLL_SECONDS = 0.02
# SLURM's default limit on the size of a job array.
_MOST_JOBS = 1_000
_STANDARD_ERROR, _CONTROLLERS = 2, "controllers.err"


class Executor(StrEnum):
    """The system that runs the jobs."""

    SLURM = "slurm"
    LOCAL = "local"


@dataclass(frozen=True)
class Submission:
    """Options for submitting jobs.

    Args:
        executor: the system that runs them.
        parameters: parameters of a job, by submitit's names.
    """

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
        return cls(executor, dict(_parameter(setting) for setting in settings or ()))


def _parameter(setting: str) -> tuple[str, Any]:
    """Returns submitit's name and the value of one `key=value`, both safe for a batch script."""
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


class Task(Protocol):
    """What a job does; it is pickled."""

    def run(self) -> None:
        """Does it; raises a `UserError` if it fails."""
        ...


@dataclass(frozen=True)
class _Failure:
    """The reason why a job failed."""

    message: str
    exit_code: ExitCode


def run_task(task: Task) -> _Failure | None:
    """Runs a job; returns the error of the user."""
    try:
        task.run()
    except UserError as error:
        return _Failure(str(error), error.exit_code)
    return None


def submitter(submission: Submission, num_workers: int) -> Callable[[Path, Sequence[Task]], None]:
    """Returns a function that runs jobs, and raises the error of the first that fails.

    Args:
        submission: the system, and the settings of a job.
        num_workers: the processors of a job, unless the settings have their number.
    """
    try:
        from submitit import AutoExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError, UncompletedJobError
    except ImportError:
        raise UserError(
            "--executor needs submitit, which is not installed; type: pip install 'protlm[cluster]'"
        ) from None

    if submission.executor is Executor.SLURM and not (which("srun") and which("sbatch")):
        raise UserError(
            "--executor slurm needs srun and sbatch, which are not on the PATH here: run it on a "
            "machine of the cluster, or use --executor local"
        )

    def run(records: Path, tasks: Sequence[Task]) -> None:
        executor = AutoExecutor(folder=records, cluster=submission.executor.value)
        executor.update_parameters(**_parameters(submission, num_workers))
        is_local = submission.executor is Executor.LOCAL
        # A cluster queues its jobs, but the local executor would start all of them at once.
        size = max(1, (os.cpu_count() or 1) // num_workers) if is_local else _MOST_JOBS
        with JobProgress("jobs", len(tasks)) as progress:
            for first in range(0, len(tasks), size):
                some = tasks[first : first + size]
                with _local_processes(records) if is_local else nullcontext():
                    jobs = _submit(executor, some, (FailedJobError, FailedSubmissionError))
                try:
                    results = _results(jobs, UncompletedJobError)
                    for number, failure in enumerate(results, first + 1):
                        _raise_if(failure)
                        progress.update(number)
                finally:
                    _end(jobs, are_awaited=is_local)

    return run


def _parameters(submission: Submission, num_workers: int) -> dict[str, Any]:
    """Returns the parameters of a job by submitit's names."""
    defaults = {"timeout_min": _TIMEOUT_MINUTES, "cpus_per_task": num_workers}
    parameters = {"name": "protlm", **defaults, **submission.parameters}
    # In SLURM 22.05 to 23.02, srun uses one core of the job unless the number is repeated.
    return {**parameters, "slurm_srun_args": [f"--cpus-per-task={parameters['cpus_per_task']}"]}


@contextmanager
def _local_processes(records: Path) -> Iterator[None]:
    """Prepares for starting submitit's controllers, which cancel their jobs when they get SIGINT.

    Their standard error goes to a file, because they print a traceback then.
    """
    before = os.dup(_STANDARD_ERROR)
    try:
        with (records / _CONTROLLERS).open("ab") as file:
            os.dup2(file.fileno(), _STANDARD_ERROR)
        with sigint_for_children():
            yield
    finally:
        os.dup2(before, _STANDARD_ERROR)
        os.close(before)


def _end(jobs: Sequence[Any], *, are_awaited: bool) -> None:
    """Cancels the jobs, and waits for local ones, so that none continues to build."""
    for job in jobs:
        job.cancel()
    while are_awaited and not all(job.done() for job in jobs):
        time.sleep(_POLL_SECONDS)


def _submit(
    executor: Any, tasks: Sequence[Task], failed: tuple[type[Exception], ...]
) -> Sequence[Any]:
    try:
        return executor.map_array(run_task, tasks)
    except failed as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the jobs could not be submitted: {reason:.500}") from error


def _results(jobs: Sequence[Any], failed: type[Exception]) -> Iterator[_Failure | None]:
    for job in jobs:
        try:
            yield job.result()
        except failed:
            yield _Failure(
                f"a job ended prematurely; see {job.paths.stderr}, then type the same command "
                "again to resume",
                ExitCode.INTERNAL,
            )


def _raise_if(failure: _Failure | None) -> None:
    if failure is None:
        return
    for kind in (InputDataError, OutputError, UserError):
        if kind.exit_code == failure.exit_code:
            raise kind(failure.message)
    raise JobFailedError(failure.message)


class JobFailedError(UserError):
    """A job was killed or crashed."""

    exit_code = ExitCode.INTERNAL
