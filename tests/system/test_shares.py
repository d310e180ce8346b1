"""Shares of the work: in processes of this machine, and in jobs of a cluster."""

import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit import LocalJob, SlurmExecutor

from protlm.system import shares as module
from protlm.system.errors import ExitCode, InputDataError, OutputError, UserError
from protlm.system.shares import Executor, ProcessDiedError, Share, Submission, here

ROOT = str(Path(__file__).resolve().parents[2])


def square(number: int) -> int:
    return number**2


def write(folder: Path, number: int) -> None:
    (folder / f"{number}").write_text(str(os.getpid()))


def fail(folder: Path, number: int) -> None:
    """Share 1 fails while share 2 runs."""
    if number == 2:
        (folder / "runs").touch()
        time.sleep(60)
        (folder / "was not ended").touch()
    while not (folder / "runs").exists():
        time.sleep(0.01)
    raise OutputError(f"no space for {number}")


def die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exhaust(number: int) -> None:
    raise MemoryError


@pytest.fixture(params=[Executor.LOCAL, pytest.param(Executor.SLURM, marks=pytest.mark.slow)])
def submission(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Submission:
    """Jobs of each kind; those of a cluster are run by submitit on this machine."""
    local = partial(submitit.AutoExecutor, cluster="local")
    monkeypatch.setattr(submitit, "AutoExecutor", lambda folder, cluster: local(folder=folder))
    monkeypatch.setattr(module.shutil, "which", lambda name: name)
    # Network file systems may show a result late, and submitit waits for it.
    monkeypatch.setattr(LocalJob, "_results_timeout_s", 0)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return Submission(request.param)


def test_every_share_is_computed(submission: Submission, tmp_path: Path) -> None:
    submission.run(partial(write, tmp_path), [1, 2, 3], tmp_path / "jobs")
    found = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert set(found) == {"1", "2", "3"}
    assert str(os.getpid()) not in found.values()


def test_no_process_goes_on_after_another_failed(tmp_path: Path) -> None:
    """It would write to the folder in which the same command resumes."""
    with pytest.raises(OutputError, match=r"^no space for 1$"):
        list(here(partial(fail, tmp_path), [1, 2], 2, ""))
    assert not multiprocessing.active_children()
    assert not (tmp_path / "was not ended").exists()


def test_a_killed_share_is_one_sentence(submission: Submission, tmp_path: Path) -> None:
    with pytest.raises(ProcessDiedError, match=r"type the same command again to resume") as caught:
        submission.run(die, [1], tmp_path / "jobs")
    assert caught.value.exit_code is ExitCode.INTERNAL
    said = "omit --executor" if submission.executor is Executor.LOCAL else ".err, then type"
    assert said in str(caught.value)


def test_processes_return_results_in_any_order() -> None:
    assert sorted(here(square, [1, 2, 3], 2, "")) == [1, 4, 9]
    with pytest.raises(UserError, match="the memory is full or limited"):
        list(here(exhaust, [1], 1, ""))


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2", ""])
def test_a_shard_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="type for instance 1/4"):
        Share.parse(text)


# --- clusters


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes this machine a node of a cluster on which `sbatch` is a shell script."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(sbatch: str) -> None:
        for name, script in (("srun", "exit 1"), ("sbatch", sbatch)):
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return install


def parsed(*settings: str) -> Submission:
    submission = Submission.parse(Executor.SLURM, settings)
    assert submission is not None
    return submission


@pytest.mark.parametrize(
    "sbatch", ["echo 'invalid partition: none' >&2; exit 1", "echo 'invalid partition: none'"]
)
def test_errors_of_sbatch_are_one_sentence(
    sbatch: str, cluster: Callable[[str], None], tmp_path: Path
) -> None:
    cluster(sbatch)
    with pytest.raises(UserError, match=r"could not be submitted: .*invalid partition: none"):
        parsed("partition=none").run(square, [1, 2], tmp_path / "jobs")


@pytest.mark.parametrize(("given", "cores"), [([], 3), (["cpus=4"], 4)])
def test_a_job_has_the_cores_of_its_workers(
    given: list[str], cores: int, cluster: Callable[[str], None], tmp_path: Path
) -> None:
    """From SLURM 22.05 on, srun has one core unless it requests those of its job."""
    cluster(f'cp "$1" {tmp_path}/script; exit 1')
    with pytest.raises(UserError, match="could not be submitted"):
        parsed(*given).run(square, [1, 2], tmp_path / "jobs", 3)
    script = (tmp_path / "script").read_text()
    assert f"#SBATCH --cpus-per-task={cores}\n" in script
    (srun,) = [line for line in script.splitlines() if line.startswith("srun ")]
    assert f" --cpus-per-task={cores} " in srun


def test_jobs_are_submitted_in_turns_and_canceled_after_an_error(
    cluster: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This scheduler accepts two jobs at a time."""
    cluster("exit 1")
    submitted, canceled = [], []

    class Job:
        def __init__(self, item: Any) -> None:
            self.item = item

        def result(self) -> object:
            return self.item

        def cancel(self) -> None:
            canceled.append(self.item)

    def map_array(self: object, function: object, items: list[Any]) -> list[Job]:
        submitted.append(items)
        return [Job(item) for item in items]

    monkeypatch.setattr(submitit.AutoExecutor, "map_array", map_array)
    monkeypatch.setattr(module, "_MOST_JOBS", 2)
    parsed().run(square, [1, 2, 3, 4, 5], tmp_path / "jobs")
    assert submitted == [[1, 2], [3, 4], [5]]
    canceled.clear()
    failures = [OutputError("no space"), InputDataError("damaged")]
    with pytest.raises(OutputError, match="no space"):
        parsed().run(square, failures, tmp_path / "jobs")
    assert canceled == failures


def test_a_missing_cluster_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"needs srun and sbatch.*--executor local"):
        parsed()
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"pip install 'protlm\[cluster\]'"):
        parsed()
    assert Submission.parse(Executor.LOCAL, None) == Submission(Executor.LOCAL)
    assert Submission.parse(None, None) is None


SETTINGS = [*("partition=cpu,long", "time=12:00:00", "account=b", "qos=c", "constraint=d")]
SETTINGS += ["mem_gb=7.5", "cpus=4", "gpus=2", "parallel=20"]


def test_submitit_accepts_the_settings(
    cluster: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster("exit 1")
    parameters = parsed(*SETTINGS).parameters
    assert parameters == {
        "slurm_partition": "cpu,long",
        "slurm_time": "12:00:00",
        "slurm_account": "b",
        "slurm_qos": "c",
        "slurm_constraint": "d",
        "mem_gb": 7.5,
        "cpus_per_task": 4,
        "gpus_per_node": 2,
        "slurm_array_parallelism": 20,
    }
    monkeypatch.setattr(SlurmExecutor, "affinity", classmethod(lambda cls: 2))
    executor: Any = submitit.AutoExecutor(folder=tmp_path, cluster="slurm")
    executor.update_parameters(**parameters)


@pytest.mark.parametrize(
    ("executor", "setting", "told"),
    [
        (Executor.SLURM, "partition", "partition"),
        (Executor.SLURM, "partition=", "partition"),
        (Executor.SLURM, "partition=a\n#SBATCH --wrap=x", "not a value"),
        (Executor.SLURM, "partition=$(reboot)", "not a value"),
        (Executor.SLURM, "cpus=many", "not a value of cpus"),
        (Executor.SLURM, "setup=reboot", "'setup' is unknown; choose one of: account, constraint"),
        (Executor.SLURM, "additional_parameters={}", "is unknown"),
        (None, "time=1", "^--slurm time=1 requires --executor slurm$"),
        (Executor.LOCAL, "time=1", "^--slurm time=1 requires .* slurm, not --executor local$"),
    ],
)
def test_other_settings_are_rejected(executor: Executor | None, setting: str, told: str) -> None:
    """Before they reach the script of a job."""
    with pytest.raises(UserError, match=told):
        Submission.parse(executor, [setting])
