"""Shares of the work: in jobs of a cluster and in processes of this machine, which end cleanly."""

import contextlib
import errno
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import submitit
from submitit import LocalJob, SlurmExecutor

from protlm.options.jobs import Executor, Share, Submission
from protlm.system import shares as module
from protlm.system.cluster import _answer
from protlm.system.errors import ExitCode, InputDataError, OutputError, UserError
from protlm.system.interruption import interrupts_held
from protlm.system.shares import ProcessDiedError, here, in_order

ROOT = str(Path(__file__).resolve().parents[2])
TEMPORARY = Path(module.tempfile.gettempdir())


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


@pytest.fixture
def submission(monkeypatch: pytest.MonkeyPatch) -> Submission:
    """Jobs of a cluster that are run by submitit on this machine."""
    local = partial(submitit.AutoExecutor, cluster="local")
    monkeypatch.setattr(submitit, "AutoExecutor", lambda folder, cluster: local(folder=folder))
    monkeypatch.setattr(module.shutil, "which", lambda name: name)
    # Network file systems may show a result late, and submitit waits for it.
    monkeypatch.setattr(LocalJob, "_results_timeout_s", 0)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    return Submission(Executor.slurm)


@pytest.mark.slow
def test_every_share_is_computed(submission, tmp_path):
    submission.run(partial(write, tmp_path), [1, 2, 3], tmp_path / "jobs")
    found = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert set(found) == {"1", "2", "3"}
    assert str(os.getpid()) not in found.values()


def test_no_process_goes_on_after_another_failed(tmp_path):
    """It would write to the folder in which the same command resumes."""
    with pytest.raises(OutputError, match=r"^no space for 1$"):
        list(here(partial(fail, tmp_path), [1, 2], 2, "", tmp_path))
    assert not multiprocessing.active_children()
    assert not (tmp_path / "was not ended").exists()


@pytest.mark.slow
def test_a_killed_share_is_one_sentence(submission, tmp_path):
    with pytest.raises(ProcessDiedError, match=r"type the same command again to resume") as caught:
        submission.run(die, [1], tmp_path / "jobs")
    assert caught.value.exit_code is ExitCode.INTERNAL
    assert ".err, then type" in str(caught.value)


def test_processes_return_results_in_any_order():
    assert sorted(here(abs, [-1, 2, -3], 2, "", TEMPORARY)) == [1, 2, 3]
    assert "the memory is full or limited" in str(_answer(exhaust, 1))


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2", ""])
def test_a_shard_that_is_not_one_is_refused(text):
    with pytest.raises(UserError, match="type for instance 1/4"):
        Share.parse(text)


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
    return Submission(Executor.slurm, settings)


@pytest.mark.parametrize(
    "sbatch", ["echo 'invalid partition: none' >&2; exit 1", "echo 'invalid partition: none'"]
)
def test_errors_of_sbatch_are_one_sentence(sbatch, cluster, tmp_path):
    cluster(sbatch)
    with pytest.raises(UserError, match=r"could not be submitted: .*invalid partition: none"):
        parsed("partition=none").run(abs, [1, 2], tmp_path / "jobs")


@pytest.mark.parametrize(("given", "cores"), [([], 3), (["cpus=4"], 4)])
def test_a_job_has_the_cores_of_its_workers(given, cores, cluster, tmp_path):
    """From SLURM 22.05 on, srun has one core unless it requests those of its job."""
    cluster(f'cp "$1" {tmp_path}/script; exit 1')
    with pytest.raises(UserError, match="could not be submitted"):
        parsed(*given).run(abs, [1, 2], tmp_path / "jobs", 3)
    script = (tmp_path / "script").read_text()
    assert f"#SBATCH --cpus-per-task={cores}\n" in script
    (srun,) = [line for line in script.splitlines() if line.startswith("srun ")]
    assert f" --cpus-per-task={cores} " in srun


def test_jobs_are_canceled_after_an_error(cluster, tmp_path, monkeypatch):
    cluster("exit 1")
    canceled = []

    def map_array(self: object, function: object, items: list[Any]) -> list[Any]:
        return [
            SimpleNamespace(result=lambda item=item: item, cancel=partial(canceled.append, item))
            for item in items
        ]

    monkeypatch.setattr(submitit.AutoExecutor, "map_array", map_array)
    failures = [OutputError("no space"), InputDataError("damaged")]
    with pytest.raises(OutputError, match="no space"):
        parsed().run(abs, failures, tmp_path / "jobs")
    assert canceled == failures


def test_a_missing_cluster_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="need srun and sbatch") as caught:
        parsed().check()
    assert caught.value.options == {"executor": None}
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"pip install 'protlm\[cluster\]'"):
        parsed().run(abs, [1], tmp_path)


# Settings of --slurm, submitit's names of them, and their values.
SETTINGS: list[tuple[str, str, object]] = [
    ("partition=cpu,long", "slurm_partition", "cpu,long"),
    ("time=12:00:00", "slurm_time", "12:00:00"),
    ("account=b", "slurm_account", "b"),
    ("qos=c", "slurm_qos", "c"),
    ("constraint=d", "slurm_constraint", "d"),
    ("mem_gb=7.5", "mem_gb", 7.5),
    ("cpus=4", "cpus_per_task", 4),
    ("gpus=2", "gpus_per_node", 2),
    ("parallel=20", "slurm_array_parallelism", 20),
]


def test_submitit_accepts_the_settings(cluster, tmp_path, monkeypatch):
    cluster("exit 1")
    parameters = parsed(*(setting for setting, _, _ in SETTINGS)).parameters
    assert parameters == {name: value for _, name, value in SETTINGS}
    monkeypatch.setattr(SlurmExecutor, "affinity", classmethod(lambda cls: 2))
    executor: Any = submitit.AutoExecutor(folder=tmp_path, cluster="slurm")
    executor.update_parameters(**parameters)


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
    """Before they reach the script of a job."""
    with pytest.raises(UserError, match=told):
        parsed(setting)
    with pytest.raises(UserError, match=r"^--slurm time=1 needs --executor slurm$"):
        Submission(slurm=("time=1",))


def results(function: Callable[[int], Any], count: int, workers: int) -> list[tuple[int, Any]]:
    return list(in_order(function, ((i, i) for i in range(count)), workers, TEMPORARY))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_of_any_size_come_in_the_order_of_the_items(workers):
    """The function is shared, since it may contain gigabytes, and what cannot be pickled."""

    def reverse(item: bytes) -> tuple[bytes, int]:
        time.sleep(0.002 * (len(item) % 3))
        return item[::-1], len(item)

    sizes = [n * 100_003 % 3_000_001 for n in range(30)]
    items = [(size, bytes([size % 251]) * size) for size in sizes]
    stream = in_order(reverse, iter(items), workers, TEMPORARY)
    assert list(stream) == [(size, (item, size)) for size, item in items]
    assert results(abs, 0, workers) == []


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("fails_at", "told"), [(20, "read 12"), (10, "item 10")])
def test_an_error_follows_the_results_before_it(workers, fails_at, told):
    """Of the function or of the items: the message must not depend on how far ahead it was read."""

    def items() -> Iterator[tuple[int, int]]:
        yield from ((number, number) for number in range(12))
        raise InputDataError("read 12")

    def fail(number: int) -> int:
        time.sleep(0.002)
        if number == fails_at:
            raise InputDataError(f"item {number}")
        return number

    seen = []
    with pytest.raises(InputDataError, match=told):
        for _, result in in_order(fail, items(), workers, TEMPORARY):
            seen.append(result)
    assert seen == list(range(min(12, fails_at)))


def stumble(number: int) -> None:
    raise KeyError(number)


def test_errors_of_a_process_have_its_traceback():
    with pytest.raises(KeyError) as caught:
        results(stumble, 3, 2)
    assert "in stumble" in str(caught.value.__cause__)
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        results(lambda number: lambda: number, 5, 2)


def open_files_and_processes() -> tuple[int, list[BaseProcess]]:
    # Garbage of earlier tests may close its files at any moment.
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), multiprocessing.active_children()


def test_a_stream_is_not_read_far_ahead_and_leaves_nothing_when_it_is_abandoned():
    before, drawn = open_files_and_processes(), []
    stream = in_order(abs, ((n, drawn.append(n) or n) for n in range(1_000)), 2, TEMPORARY)
    for _ in range(10):
        next(stream)
    assert len(drawn) < 20
    assert len(multiprocessing.active_children()) == 2
    stream.close()
    assert open_files_and_processes() == before


def test_a_killed_process_ends_the_stream_with_a_sentence():
    """Also while another one is running, which would be waited for indefinitely."""

    def die(number: int) -> int:
        time.sleep(60 * (number == 4))
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(ProcessDiedError, match=r"killed.*use fewer processes") as caught:
        results(die, 30, 2)
    assert caught.value.exit_code is ExitCode.INTERNAL


@pytest.mark.slow
def test_a_process_killed_while_it_passes_a_large_result_ends_the_stream():
    """The executor would wait for the rest of what is in its pipe."""
    delay = 0.0

    def work(number: int) -> bytes:
        if number == 3:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return bytes(1 << 23)

    for turn in range(10):
        delay = 0.003 * turn
        with pytest.raises(ProcessDiedError):
            results(work, 60, 2)


# Prints the process IDs of two workers, a line per item, until it is killed or interrupted.
PRINT_IDS = """
import os, signal, time
from pathlib import Path
from tempfile import gettempdir
from protlm.system.errors import exit_with_message
from protlm.system.interruption import sigterm_as_interrupt
from protlm.system.shares import in_order

def work(number):
    time.sleep(0.05)
    return os.getpid()
def print_ids():
    with sigterm_as_interrupt():
        for _, pid in in_order(work, ((i, i) for i in range(10_000)), 2, Path(gettempdir())):
            print(pid, flush=True)

# A shell makes the processes that it starts in the background ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
exit_with_message(print_ids)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """A process with two workers, which is to be killed or interrupted."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRINT_IDS],
        env={**os.environ, "PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    # With its workers, which would keep its pipes open.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def two_workers(process: subprocess.Popen[str]) -> set[int]:
    workers = set()
    while len(workers) < 2:
        workers.add(int(process.stdout.readline()))
    return workers


def test_processes_end_when_their_parent_is_killed(parent, assert_gone):
    workers = two_workers(parent)
    parent.kill()
    assert_gone(*workers)


@pytest.mark.parametrize("to", ["the group, by a terminal", "one after the other, by a cluster"])
def test_an_interruption_ends_all_processes_without_a_traceback(parent, to, assert_gone):
    """In SLURM: that workers may die first is not reported as a lack of memory."""
    workers = two_workers(parent)
    if "terminal" in to:
        os.killpg(parent.pid, signal.SIGINT)
    else:
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
        time.sleep(0.3)
        parent.terminate()
    told = parent.communicate(timeout=60)[1]
    assert (parent.returncode, told) == (130, "protlm: interrupted\n")
    assert_gone(*workers)


@contextlib.contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_processes_ignore_signals_that_their_parent_handles():
    """SLURM sends submitit's SIGUSR2 to all processes of a job; only the parent handles it."""
    this = os.getpid()

    def work(number: int) -> int:
        os.kill(os.getpid(), signal.SIGUSR2)
        return number

    with handled(signal.SIGUSR2, lambda *_: os._exit(1) if os.getpid() != this else None):
        assert results(work, 20, 2) == [(i, i) for i in range(20)]


def test_a_signal_to_a_fork_that_is_not_yet_prepared(monkeypatch):
    """The child would otherwise remove its parent's lock and work folder."""
    fork, this = os.fork, os.getpid()

    def fork_and_interrupt() -> int:
        pid = fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return pid

    monkeypatch.setattr(os, "fork", fork_and_interrupt)
    try:
        with handled(signal.SIGINT, signal.default_int_handler):
            assert results(abs, 5, 2) == [(i, i) for i in range(5)]
    finally:
        if os.getpid() != this:
            os._exit(1)


@pytest.mark.parametrize(("owner", "name"), [(BaseProcess, "kill"), (module.shutil, "rmtree")])
def test_a_second_ctrl_c_leaves_no_processes_and_files(owner, name, look_at, tmp_path):
    stream = in_order(abs, ((n, n) for n in range(1_000)), 2, tmp_path)
    next(stream)
    # A signal that one thread blocks may be delivered to another, such as that of a progress bar.
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    look_at(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    with handled(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt())
    over.set()
    assert not multiprocessing.active_children()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_delayed_signal_arrives_after_the_block(number):
    seen = []
    with handled(number, lambda *_: seen.append("handled")):
        with interrupts_held():
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            seen.append("block")
        assert seen == ["block", "handled"]
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert seen == ["block", "handled", "handled"]


def test_limits_on_processes_and_open_files_are_explained(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with pytest.raises(UserError, match=r"^256 worker processes.*open files.*ulimit -n"):
            results(abs, 5, 256)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fork, forked = os.fork, []

    def fork_twice() -> int:
        if len(forked) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        forked.append(fork())
        return forked[-1]

    monkeypatch.setattr(os, "fork", fork_twice)
    with pytest.raises(UserError, match=r"^5 worker processes.*unavailable.*fewer processes"):
        results(abs, 5, 5)
    assert not multiprocessing.active_children()
