"""One job for each source, on a SLURM cluster or as local processes, and their parts merged."""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from shutil import which
from typing import Any, Self

from data_prep.families import refuse_empty_hold_out
from data_prep.interruption import sigterm_as_interrupt
from data_prep.merge import merge_into
from data_prep.prepare import PrepareOptions, prepare
from data_prep.report import Report
from data_prep.sources import STANDARD_INPUT, find_sources, recognise, refuse_inside
from data_prep.split import SplitRule
from data_prep.work_folder import Plan, refuse_finished, work_folder
from protlm.console import console
from protlm.data.manifest import MANIFEST
from protlm.errors import ExitCode, InputDataError, OutputError, UserError, one_of
from protlm.progress import JobProgress

_WORD = re.compile(r"[\w.:,@+-]{1,100}", re.ASCII)
# What `--slurm` may set: submitit's name for it, and the kind of its value.
_PARAMETERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "partition": ("slurm_partition", str),
    "time": ("slurm_time", str),
    "account": ("slurm_account", str),
    "qos": ("slurm_qos", str),
    "constraint": ("slurm_constraint", str),
    "mem_gb": ("mem_gb", float),
    "cpus": ("cpus_per_task", int),
    "parallel": ("slurm_array_parallelism", int),
}
_TIMEOUT_MINUTES = 24 * 60
_POLL_SECONDS = 0.02
# As many has an array of SLURM's, unless its administrator wants more.
_MOST_JOBS = 1_000
_STANDARD_ERROR, _CONTROLLERS = 2, "controllers.err"


class Executor(StrEnum):
    """What runs the jobs."""

    SLURM = "slurm"
    LOCAL = "local"


@dataclass(frozen=True)
class Submission:
    """How jobs are submitted.

    Args:
        executor: what runs them.
        parameters: of a job, by submitit's names.
    """

    executor: Executor
    parameters: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, executor: Executor | None, settings: Sequence[str] | None) -> Self | None:
        """The submission that `--executor` and `--slurm key=value` ask for, if any.

        Raises:
            UserError: settings without SLURM, an unknown one, or an impossible value.
        """
        if settings and executor is not Executor.SLURM:
            given = "" if executor is None else f", not --executor {executor.value}"
            raise UserError(f"--slurm {settings[0]} needs --executor slurm{given}")
        if executor is None:
            return None
        return cls(executor, dict(_parameter(setting) for setting in settings or ()))


def _parameter(setting: str) -> tuple[str, Any]:
    """The name and value for submitit of one `key=value`; both go into a batch script."""
    key, _, value = setting.partition("=")
    if key not in _PARAMETERS:
        raise UserError(f"--slurm {setting}: there is no {key!r}, only {one_of(list(_PARAMETERS))}")
    name, kind = _PARAMETERS[key]
    try:
        if not _WORD.fullmatch(value):
            raise ValueError
        return name, kind(value)
    except ValueError:
        raise UserError(
            f"--slurm {setting} is no value for {key}; for instance: partition=cpu time=12:00:00 "
            "mem_gb=8 cpus=4"
        ) from None


@dataclass(frozen=True)
class _Failure:
    """Why a job has not made its part."""

    message: str
    exit_code: ExitCode


def prepare_by_jobs(
    sources: Sequence[Path],
    out: Path,
    *,
    split_rule: SplitRule,
    options: PrepareOptions,
    submission: Submission,
) -> Report:
    """Prepares each source in a job of its own, waits for them all, and merges what they made.

    Interrupted, it is continued by the same call: jobs go on from where they were.

    Args:
        sources: the files.
        out: the folder to make.
        split_rule: which split a record belongs to.
        options: as for `prepare`.
        submission: how jobs are submitted.

    Raises:
        UserError: submitit is missing, or what is asked for needs all sources at once.
        InputDataError, OutputError: as from `prepare`, of the first job that failed.
    """
    refuse_finished(out)
    refuse_inside(sources, out)
    if options.deduplicate or STANDARD_INPUT in sources:
        what = "--deduplicate" if options.deduplicate else "standard input"
        raise UserError(f"--executor makes a job of each file, which {what} does not allow")
    settings = {**options.settings(), "--executor": submission.executor.value}
    plan = Plan(find_sources(sources), settings, split_rule.describe())
    run = _submitter(submission, options.workers)
    with (
        sigterm_as_interrupt(),
        work_folder(out, plan, restart=options.restart, break_lock=options.break_lock) as work,
    ):
        recognise(plan.sources, options.reading)
        work.parts.mkdir(exist_ok=True)
        parts = [work.parts / f"{number:05d}" for number in range(len(plan.sources))]
        tasks = [
            _Task(
                source.path.absolute(),
                part.absolute(),
                split_rule,
                replace(options, restart=False, is_part=True),
            )
            for source, part in zip(plan.sources, parts, strict=True)
        ]
        run(work.path / "jobs", tasks)
        report = merge_into(work.data, parts)
        refuse_empty_hold_out(report.split_rule, report.counts.noted)
    console(stderr=True).print(report.table())
    return report


@dataclass(frozen=True)
class _Task:
    """What a job is to do."""

    source: Path
    part: Path
    split_rule: SplitRule
    options: PrepareOptions


def _prepare_part(task: _Task) -> _Failure | None:
    """The job: makes a part, unless it is there already."""
    try:
        if not (task.part / MANIFEST).is_file():
            prepare([task.source], task.part, split_rule=task.split_rule, options=task.options)
    except UserError as error:
        return _Failure(str(error), error.exit_code)
    return None


def _submitter(submission: Submission, num_workers: int) -> Callable[[Path, Sequence[_Task]], None]:
    """What runs jobs with their records in a folder; raises what the first failed one says."""
    try:
        from submitit import AutoExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError, UncompletedJobError
    except ImportError:
        raise UserError(
            "--executor needs submitit, which is not installed; type: pip install 'protlm[cluster]'"
        ) from None

    if submission.executor is Executor.SLURM and not (which("srun") and which("sbatch")):
        raise UserError(
            "--executor slurm needs srun and sbatch, which are not on the PATH here: type it on a "
            "machine of the cluster, or --executor local"
        )

    def run(records: Path, tasks: Sequence[_Task]) -> None:
        executor = AutoExecutor(folder=records, cluster=submission.executor.value)
        executor.update_parameters(**_parameters(submission, num_workers))
        is_local = submission.executor is Executor.LOCAL
        # A cluster queues its jobs; this machine would run them all at once.
        size = max(1, (os.cpu_count() or 1) // num_workers) if is_local else _MOST_JOBS
        with JobProgress("files", len(tasks)) as progress:
            for first in range(0, len(tasks), size):
                some = tasks[first : first + size]
                with _standard_error_to(records / _CONTROLLERS) if is_local else nullcontext():
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
    """What submitit is told of a job."""
    defaults = {"timeout_min": _TIMEOUT_MINUTES, "cpus_per_task": num_workers}
    parameters = {"name": "protlm-prepare", **defaults, **submission.parameters}
    # SLURM 22.05 to 23.02 gives srun one core of the job's, unless it asks for them again.
    return {**parameters, "slurm_srun_args": [f"--cpus-per-task={parameters['cpus_per_task']}"]}


@contextmanager
def _standard_error_to(path: Path) -> Iterator[None]:
    """Gives what is started in the block a file to complain to: submitit's controllers, which end
    with a traceback where jobs are ended."""
    before = os.dup(_STANDARD_ERROR)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), _STANDARD_ERROR)
        yield
    finally:
        os.dup2(before, _STANDARD_ERROR)
        os.close(before)


def _end(jobs: Sequence[Any], *, are_awaited: bool) -> None:
    """Ends the jobs; those of this machine are gone then, and build nothing behind our back."""
    for job in jobs:
        job.cancel()
    while are_awaited and not all(job.done() for job in jobs):
        time.sleep(_POLL_SECONDS)


def _submit(
    executor: Any, tasks: Sequence[_Task], failed: tuple[type[Exception], ...]
) -> Sequence[Any]:
    try:
        return executor.map_array(_prepare_part, tasks)
    except failed as error:
        told = " ".join(str(error).split())
        raise UserError(f"the jobs could not be submitted: {told:.500}") from error


def _results(jobs: Sequence[Any], failed: type[Exception]) -> Iterator[_Failure | None]:
    for job in jobs:
        try:
            yield job.result()
        except failed:
            yield _Failure(
                f"a job ended before its time; see {job.paths.stderr}, then type the same command "
                "again to go on",
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
    """A job was killed or broke down."""

    exit_code = ExitCode.INTERNAL
