"""Shares of a command's work: computed by processes of this machine, or by jobs of a cluster."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from shutil import which
from types import ModuleType
from typing import Any, Self, TypeVar

from protlm.system.errors import UserError, of_the_system, one_of
from protlm.system.pool import ProcessDiedError, processes
from protlm.system.terminal import JobProgress

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
# SLURM's default limit on the size of a job array.
_MOST_JOBS = 1_000


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
    """Options of jobs, each of which computes a share.

    Args:
        executor: what runs them.
        parameters: of each job, by submitit's names.
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
        parameters = dict(_parameter(setting) for setting in settings or ())
        if executor is Executor.SLURM:
            _submitit()
        return cls(executor, parameters)

    def run(
        self, function: Callable[[Item], Any], items: Sequence[Item], folder: Path, cores: int = 1
    ) -> None:
        """Applies a function to every item, each in a job; raises the error of a job that fails.

        Args:
            function: it and the items are pickled.
            items: one for each job.
            folder: where jobs of a cluster keep what they print.
            cores: of each job, unless the parameters have their number.
        """
        if self.executor is Executor.LOCAL:
            at_once = max(1, (os.cpu_count() or 1) // cores)
            results = here(function, items, at_once, "omit --executor")
        else:
            results = self._on_cluster(partial(_answer, function), items, folder, cores)
        with JobProgress("jobs", len(items)) as progress:
            for number, _ in enumerate(results, 1):
                progress.update(number)

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
        for first in range(0, len(items), _MOST_JOBS):
            try:
                jobs = executor.map_array(function, items[first : first + _MOST_JOBS])
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
    function: Callable[[Item], Result], items: Sequence[Item], at_once: int, advice: str
) -> Iterator[Result]:
    """Yields the results of a function in any order, computed by processes of this machine.

    Args:
        function: it and the items are pickled.
        items: what it is applied to.
        at_once: number of processes.
        advice: as for `pool.processes`.
    """
    with processes(partial(_answer, function), min(at_once, len(items)), advice) as submit:
        for future in as_completed([submit(item) for item in items]):
            yield _checked(future.result())


def _answer(function: Callable[[Item], Result], item: Item) -> Result | UserError:
    """Applies the function in another process; returns the error of the user, if there is one."""
    try:
        return function(item)
    except UserError as error:
        return error
    except Exception as error:
        if (known := of_the_system(error)) is None:
            raise
        return known


def _checked(answer: Result | UserError) -> Result:
    if isinstance(answer, UserError):
        raise answer
    return answer


def _result(job: Any, uncompleted: type[Exception]) -> Any:
    try:
        return _checked(job.result())
    except uncompleted:
        raise ProcessDiedError(
            f"a job ended prematurely; see {job.paths.stderr}, then type the same command again to "
            "resume"
        ) from None


def _submitit() -> ModuleType:
    """Returns submitit, on a machine that can submit jobs."""
    try:
        import submitit
    except ImportError:
        raise UserError(
            "--executor slurm needs submitit, which is not installed; type: pip install "
            "'protlm[cluster]'"
        ) from None
    if not (which("srun") and which("sbatch")):
        raise UserError(
            "--executor slurm needs srun and sbatch, which are not on the PATH here: run it on a "
            "machine of the cluster, or use --executor local"
        )
    return submitit


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
