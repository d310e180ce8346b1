"""One job per file: the same sequences as in one process, and resumable."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from submitit import LocalJob

from protlm.data.shards.manifest import read_manifest
from protlm.data_prep import source_jobs
from protlm.data_prep import submission as module
from protlm.data_prep.merge import merge
from protlm.data_prep.prepare import PrepareOptions, prepare
from protlm.data_prep.source_jobs import prepare_by_jobs
from protlm.data_prep.split import HashSplit
from protlm.data_prep.submission import Executor, Submission
from protlm.system.errors import ExitCode, InputDataError, OutputError, UserError

ROOT = str(Path(__file__).resolve().parents[2])
LOCAL = Submission(Executor.LOCAL)
RULE = HashSplit(0.2, 0.1)


@pytest.fixture
def release(tmp_path):
    """Two files of proteins in a folder."""
    folder = tmp_path / "release"
    folder.mkdir()
    for name, count in (("one", 150), ("two", 50)):
        proteins = [f">{name}{i}\nMKV{'LAW' * (i % 40)}\n" for i in range(count)]
        (folder / f"{name}.fasta").write_text("".join(proteins))
    return folder


def merged(release, tmp_path) -> Path:
    """The files of the release, each prepared in this process, and merged."""
    parts = []
    for name in ("one", "two"):
        parts.append(tmp_path / name)
        options = PrepareOptions(max_reject_rate=0.1)
        prepare([release / f"{name}.fasta"], parts[-1], split_rule=RULE, options=options)
    merge(parts, tmp_path / "merged")
    return tmp_path / "merged"


def test_jobs_make_the_parts_that_are_merged(release, tmp_path, monkeypatch, contents):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    prepare_locally(release, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "release"]
    assert contents(tmp_path / "data") == contents(merged(release, tmp_path))


@pytest.mark.slow
def test_failed_jobs_are_resumed(release, tmp_path, protlm_command, contents):
    arguments = ["prepare", "release", "--out", "data", "--valid-fraction", "0.2"]
    arguments += ["--test-fraction", "0.1", "--executor", "local"]
    (release / "two.fasta").write_text("no header\n")
    done = protlm_command(*arguments, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "two.fasta, line 1" in done.stderr
    assert not (tmp_path / "data").exists()
    two = "".join(f">two{i}\nMWV{'LAW' * (i % 40)}\n" for i in range(50))
    (release / "two.fasta").write_text(f"{two}>bad\nM-\n>bad\nM-\n")
    done = protlm_command(*arguments, cwd=tmp_path)
    # The first file is done, and the second says in its job why it cannot be used.
    assert done.returncode == 3, done.stderr
    assert "2 of 52 records" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "data.partial" / "parts" / "00000" / "manifest.json").is_file()
    done = protlm_command(*arguments, "--max-reject-rate", "0.1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "release"]
    assert contents(tmp_path / "data") == contents(merged(release, tmp_path))


def prepare_locally(release, tmp_path, **options):
    prepare_by_jobs(
        sorted(release.iterdir()),
        tmp_path / "data",
        split_rule=RULE,
        options=PrepareOptions(**options),
        submission=LOCAL,
    )


@pytest.fixture
def in_this_process(monkeypatch):
    """Runs jobs one after the other in this process; returns the parts."""
    made = []

    def submitter(submission, num_workers):
        def run(records, tasks):
            for task in tasks:
                made.append(task.part.name)
                assert module.run_task(task) is None

        return run

    monkeypatch.setattr(source_jobs, "submitter", submitter)
    return made


@pytest.mark.usefixtures("in_this_process")
def test_an_error_while_merging_keeps_the_parts(release, tmp_path, monkeypatch, contents):
    """They may have taken a cluster days."""

    def fill_the_disk(directory, parts):
        (directory / "train").mkdir()
        (directory / "train" / "shard-00000.h5").write_text("half a shard")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(source_jobs, "merge_into", fill_the_disk)
        with pytest.raises(OutputError, match="no space left"):
            prepare_locally(release, tmp_path)
    parts = tmp_path / "data.partial" / "parts"
    before = contents(parts)
    assert {name.split("/")[0] for name in before} == {"00000", "00001"}
    monkeypatch.setattr(source_jobs, "prepare", None)
    prepare_locally(release, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "release"]
    assert sum(entry.sequences for entry in read_manifest(tmp_path / "data").splits["train"]) > 100


@pytest.mark.usefixtures("in_this_process")
def test_errors_of_the_merged_set_are_reported_again(release, tmp_path, monkeypatch):
    def refuse(rule, noted):
        raise InputDataError("an empty hold-out")

    monkeypatch.setattr(source_jobs, "refuse_empty_hold_out", refuse)
    for _ in range(2):
        with pytest.raises(InputDataError, match="an empty hold-out"):
            prepare_locally(release, tmp_path)
    assert not (tmp_path / "data").exists()


def test_a_killed_job_is_reported_and_the_others_are_canceled(release, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    # Network file systems may show a result late, and submitit waits for it.
    monkeypatch.setattr(LocalJob, "_results_timeout_s", 0)
    monkeypatch.setattr(module, "run_task", lambda task: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(UserError, match=r"a job ended prematurely; see .*\.err") as caught:
        prepare_locally(release, tmp_path)
    assert caught.value.exit_code is ExitCode.INTERNAL
    assert not (tmp_path / "data").exists()


@pytest.fixture(
    params=[pytest.param(signal.default_int_handler, marks=pytest.mark.slow), signal.SIG_IGN],
    ids=["terminal", "script"],
)
def sigint(request):
    """SIGINT as in a terminal, and as in a shell script's command in the background."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    assert signal.getsignal(signal.SIGINT) == request.param
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
def test_no_job_continues_after_another_failed(release, tmp_path, monkeypatch):
    """It would write to the folder in which the same command resumes."""

    def fail_or_go_on(task):
        if task.source.name == "two.fasta":
            (tmp_path / "resume").touch()
            time.sleep(60)
            (tmp_path / "was not canceled").touch()
        while not (tmp_path / "resume").exists():
            time.sleep(0.01)
        return module._Failure("one is damaged", ExitCode.BAD_INPUT)

    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(module, "run_task", fail_or_go_on)
    with pytest.raises(InputDataError, match="one is damaged"):
        prepare_locally(release, tmp_path)
    assert [line for line in command_lines() if os.fsencode(tmp_path) in line] == []
    assert not (tmp_path / "was not canceled").exists()


def command_lines():
    """The command lines of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # It may have ended since.
        with contextlib.suppress(OSError):
            yield path.read_bytes()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A cluster node on which `sbatch` is this program."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(sbatch: str) -> None:
        for name, script in (("srun", "exit 1"), ("sbatch", sbatch)):
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return install


def submit(release, tmp_path, workers=1, **parameters):
    prepare_by_jobs(
        sorted(release.iterdir()),
        tmp_path / "data",
        split_rule=RULE,
        options=PrepareOptions(workers=workers),
        submission=Submission(Executor.SLURM, {"slurm_partition": "none", **parameters}),
    )


@pytest.mark.parametrize("executor", list(Executor))
def test_jobs_are_submitted_in_turns(tmp_path, cluster, monkeypatch, executor):
    """Four cores run two jobs of two cores; this scheduler accepts two jobs at a time."""
    cluster("exit 1")
    sizes = []

    def submitted(executor, tasks, failed):
        sizes.append(len(tasks))
        job = SimpleNamespace(result=lambda: None, cancel=lambda: None, done=lambda: True)
        return [job for _ in tasks]

    monkeypatch.setattr(module, "_submit", submitted)
    monkeypatch.setattr(module, "_MOST_JOBS", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    task = source_jobs._Task(tmp_path, tmp_path, RULE, None, PrepareOptions())
    module.submitter(Submission(executor), 2)(tmp_path / "jobs", [task] * 5)
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize(
    "sbatch", ["echo 'invalid partition: none' >&2; exit 1", "echo 'invalid partition: none'"]
)
def test_errors_of_sbatch_are_one_sentence(release, tmp_path, cluster, sbatch):
    cluster(sbatch)
    with pytest.raises(UserError, match=r"could not be submitted: .*invalid partition: none"):
        submit(release, tmp_path)
    assert not (tmp_path / "data.partial").exists()


@pytest.mark.parametrize(("given", "cores"), [({}, 3), ({"cpus_per_task": 4}, 4)])
def test_a_job_has_the_cores_of_its_workers(release, tmp_path, cluster, given, cores):
    """From SLURM 22.05 on, srun has one core unless it requests those of its job."""
    cluster(f'cp "$1" {tmp_path}/script; exit 1')
    with pytest.raises(UserError, match="could not be submitted"):
        submit(release, tmp_path, workers=3, **given)
    script = (tmp_path / "script").read_text()
    assert f"#SBATCH --cpus-per-task={cores}\n" in script
    (srun,) = [line for line in script.splitlines() if line.startswith("srun ")]
    assert f" --cpus-per-task={cores} " in srun


def test_a_missing_cluster_is_reported(release, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"needs srun and sbatch.*--executor local"):
        submit(release, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["release"]


def test_the_error_without_submitit_names_the_package(release, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"pip install 'protlm\[cluster\]'"):
        prepare_locally(release, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["release"]


def test_options_that_need_all_sources_are_rejected(release, tmp_path):
    with pytest.raises(UserError, match=r"--executor.*--deduplicate"):
        prepare_locally(release, tmp_path, deduplicate=True)


def test_settings_of_a_job_are_checked_before_they_reach_its_script():
    settings = ["partition=cpu,long", "time=12:00:00", "mem_gb=7.5", "cpus=4", "parallel=20"]
    submission = Submission.parse(Executor.SLURM, settings)
    assert submission is not None
    assert submission.parameters == {
        "slurm_partition": "cpu,long",
        "slurm_time": "12:00:00",
        "mem_gb": 7.5,
        "cpus_per_task": 4,
        "slurm_array_parallelism": 20,
    }
    assert Submission.parse(None, None) is None


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("partition", "partition"),
        ("partition=", "partition"),
        ("partition=a\n#SBATCH --wrap=x", "not a value"),
        ("partition=$(reboot)", "not a value"),
        ("cpus=many", "not a value of cpus"),
        ("setup=reboot", "'setup' is unknown; choose one of: account, constraint"),
        ("additional_parameters={}", "is unknown"),
    ],
)
def test_other_settings_are_rejected(setting, told):
    with pytest.raises(UserError, match=told):
        Submission.parse(Executor.SLURM, [setting])


@pytest.mark.parametrize(
    ("executor", "told"), [(None, "slurm$"), (Executor.LOCAL, "slurm, not --executor local$")]
)
def test_settings_without_slurm_are_rejected(executor, told):
    with pytest.raises(UserError, match=f"^--slurm time=1 requires --executor {told}"):
        Submission.parse(executor, ["time=1"])


def test_submitit_accepts_the_parameters(tmp_path, monkeypatch):
    """The names are those of submitit, also for SLURM, which is not installed here."""
    from submitit import AutoExecutor, SlurmExecutor

    monkeypatch.setattr(SlurmExecutor, "affinity", classmethod(lambda cls: 2))
    executor = AutoExecutor(folder=tmp_path, cluster="slurm")
    settings = ["partition=a", "time=10", "account=b", "qos=c", "constraint=d", "mem_gb=1"]
    submission = Submission.parse(Executor.SLURM, [*settings, "cpus=2", "parallel=3"])
    assert submission is not None
    executor.update_parameters(**submission.parameters)
