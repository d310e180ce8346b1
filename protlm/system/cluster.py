"""Shares of a command's work, computed by jobs of a cluster."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from protlm.system.errors import UserError, of_the_system
from protlm.system.shares import ProcessDiedError
from protlm.system.terminal import watched

Item = TypeVar("Item")
Result = TypeVar("Result")

_TIMEOUT_MINUTES = 24 * 60


def on_cluster(
    function: Callable[[Item], Any],
    items: Sequence[Item],
    folder: Path,
    cores: int,
    parameters: Mapping[str, Any],
) -> None:
    """Applies a function to every item, each in a job; raises the error of a job that fails.

    Function and items are pickled. Jobs keep in the folder what they print, and have this number
    of cores, unless the parameters have another.
    """
    results = _results(partial(_answer, function), items, folder, cores, parameters)
    for _ in watched("jobs", results, total=len(items)):
        pass


def _results(
    function: Callable[[Item], Any],
    items: Sequence[Item],
    folder: Path,
    cores: int,
    own: Mapping[str, Any],
) -> Iterator[Any]:
    library = submitit()
    errors = library.core.utils
    executor = library.AutoExecutor(folder=folder, cluster="slurm")
    parameters = {
        "name": "protlm",
        "timeout_min": _TIMEOUT_MINUTES,
        "cpus_per_task": cores,
        **own,
    }
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
            try:
                answer = job.result()
            except errors.UncompletedJobError:
                raise ProcessDiedError(
                    f"a job ended prematurely; see {job.paths.stderr}, then type the same command "
                    "again to resume"
                ) from None
            if isinstance(answer, UserError):
                raise answer
            yield answer
    finally:
        for job in jobs:
            job.cancel()


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


def submitit() -> ModuleType:
    """Returns submitit, on a machine that can submit jobs."""
    try:
        import submitit as library
    except ImportError:
        raise UserError(
            "jobs of a cluster need submitit, which is not installed; type: pip install "
            "'protlm[cluster]'"
        ) from None
    if not (shutil.which("srun") and shutil.which("sbatch")):
        raise UserError(
            "jobs of a cluster need srun and sbatch, which are not on the PATH here: run it on a "
            "machine of the cluster",
            {"executor": None},
        )
    return library
