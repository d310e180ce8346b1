"""The lock of a dead builder is explained, and taken over where that is safe."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from protlm import lock
from protlm.data_prep.lock import BuildLock
from protlm.data_prep.prepare import PrepareOptions, prepare
from protlm.data_prep.split import HashSplit
from protlm.data_prep.work_folder import Plan, work_folder
from protlm.errors import OutputError
from protlm.lock import LOCK
from tests.marks import slow_but

PROGRAMS = Path(__file__).parent / "programs"
RULE = HashSplit(0, 0)
SINCE = "2026-01-01T00:00:00+00:00"


@pytest.fixture
def locked(tmp_path):
    """Leaves a lock in the work folder of `data`, and returns the data set's path."""

    def lock(**fields) -> Path:
        partial = tmp_path / "data.partial"
        partial.mkdir(exist_ok=True)
        (partial / LOCK).write_text(json.dumps(fields))
        return tmp_path / "data"

    return lock


def test_the_lock_of_a_dead_process_of_this_machine_is_taken_over(
    locked, dead_process, proteins, capsys
):
    out = locked(host=socket.gethostname(), pid=dead_process, since=SINCE, start="0")
    prepare([proteins], out, split_rule=RULE)
    assert "taking over from process" in capsys.readouterr().err
    assert [path.name for path in out.parent.iterdir()] == ["data"]


def test_of_two_processes_one_takes_over(locked, dead_process, monkeypatch):
    """Both start while the first still reads the lock file."""
    out = locked(host=socket.gethostname(), pid=dead_process, since=SINCE, start="0")
    read = lock._read

    def read_slowly(path):
        time.sleep(0.3)
        return read(path)

    def take():
        try:
            BuildLock(out.with_name("data.partial"))
        except OutputError:
            os._exit(7)
        time.sleep(1.5)
        os._exit(0)

    monkeypatch.setattr(lock, "_read", read_slowly)
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=take) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in both:
            process.start()
    for process in both:
        process.join()
    assert sorted(process.exitcode for process in both) == [0, 7]


def test_a_process_that_reuses_the_process_id_does_not_keep_the_lock(locked, proteins):
    out = locked(host=socket.gethostname(), pid=os.getpid(), since=SINCE, start="another time")
    prepare([proteins], out, split_rule=RULE)
    assert out.is_dir()


def test_a_running_process_is_never_taken_over(tmp_path, proteins):
    partial = tmp_path / "data.partial"
    partial.mkdir()
    held = BuildLock(partial)
    before = (partial / LOCK).read_bytes()
    for break_lock in (False, True):
        options = PrepareOptions(break_lock=break_lock)
        with pytest.raises(OutputError, match=f"is being built by process {os.getpid()} on"):
            prepare([proteins], tmp_path / "data", split_rule=RULE, options=options)
    assert (partial / LOCK).read_bytes() == before
    held.release()


@pytest.fixture
def start_holder(tmp_path):
    """Starts a process that locks `tmp_path`; a command may precede Python."""
    holders = []

    def start(*command):
        process = subprocess.Popen(
            [*command, sys.executable, PROGRAMS / "hold_lock.py", tmp_path],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        holders.append(process)
        assert process.stdout.readline() == b"\n", f"{command} failed, for which it has to be root"
        return process

    yield start
    for process in holders:
        process.kill()
        process.communicate()


def test_a_zombie_does_not_keep_the_lock(start_holder, tmp_path, capsys):
    """A killed process whose parent has not collected its status still has its process ID."""
    holder = start_holder()
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    BuildLock(tmp_path).release()
    assert f"taking over from process {holder.pid} on" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.pidns
def test_a_process_in_another_container_keeps_the_lock(start_holder, tmp_path):
    """Its process ID, 1, belongs to another process here."""
    start_holder("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    for break_lock in (False, True):
        with pytest.raises(OutputError, match="is being built by process 1 on"):
            BuildLock(tmp_path, break_lock=break_lock)


def test_the_children_of_a_killed_process_do_not_keep_the_lock(tmp_path):
    """Workers end some time after their parent."""
    context = multiprocessing.get_context("fork")
    released, ready = context.Event(), context.Event()

    def hold():
        BuildLock(tmp_path)
        if not os.fork():
            ready.set()
            released.wait(60)
            os._exit(0)
        signal.pause()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        holder = context.Process(target=hold)
        holder.start()
    try:
        assert ready.wait(60)
        holder.kill()
        holder.join()
        BuildLock(tmp_path).release()
    finally:
        released.set()


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "elsewhere", "pid": 1, "since": SINCE, "start": "0"},
        {"host": "elsewhere"},
        {"pid": "none", "host": 7},
    ],
)
def test_a_lock_of_another_machine_is_explained_and_broken_on_request(locked, proteins, fields):
    out = locked(**fields)
    with pytest.raises(OutputError, match="--break-lock"):
        prepare([proteins], out, split_rule=RULE)
    assert (out.with_name("data.partial") / LOCK).is_file()
    prepare([proteins], out, split_rule=RULE, options=PrepareOptions(break_lock=True))
    assert [path.name for path in out.parent.iterdir()] == ["data"]


@pytest.mark.parametrize(
    "moment", slow_but(["fcntl.flock", "os.fstat", "Path.write_text"], "fcntl.flock")
)
@pytest.mark.parametrize("mode", slow_but(["a", "w"], "w"))
def test_a_builder_killed_while_it_locks_does_not_keep_the_lock(
    run_builder, proteins, tmp_path, moment, mode
):
    """The same command continues after a kill at any moment, without --break-lock."""
    program = PROGRAMS / "build_killed_while_locking.py"
    out = tmp_path / "data"
    killed = run_builder(program, proteins, out, *moment.split("."), mode)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "data.partial" / LOCK).read_bytes() == b""
    done = run_builder(PROGRAMS / "build_data_set.py", proteins, out)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("fault", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_flock(tmp_path, monkeypatch, fault):
    """There only the lock file shows that another process may be writing."""

    def refuse(*arguments):
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(fcntl, "flock", refuse)
    first = BuildLock(tmp_path)
    with pytest.raises(OutputError, match=f"by process {os.getpid()} on .*--break-lock"):
        BuildLock(tmp_path)
    assert first.is_held
    first.release()
    assert not list(tmp_path.iterdir())
    (tmp_path / LOCK).write_text('{"host": "elsewhere", "pid": 1, "since": ""}')
    assert BuildLock(tmp_path, break_lock=True).is_held


def test_a_lock_file_that_is_removed_while_it_is_locked_is_created_again(tmp_path, monkeypatch):
    """The previous owner removes it between `open` and `flock`."""
    lock_file, removed = fcntl.flock, []

    def remove_and_lock(*arguments):
        if not removed:
            removed.append((tmp_path / LOCK).unlink())
        lock_file(*arguments)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    assert BuildLock(tmp_path).is_held
    assert len(removed) == 1


def test_a_job_that_a_cluster_terminates_releases_its_lock(
    run_builder, proteins, tmp_path, contents
):
    """It may resume on another machine, which cannot check whether the owner is running."""
    out = tmp_path / "data"
    done = run_builder(PROGRAMS / "build_terminated.py", proteins, out)
    assert done.returncode == 130, done.stderr
    assert "protlm: interrupted" in done.stderr
    partial = out.with_name("data.partial")
    assert (partial / "journal" / "segment-00003.json").exists()
    assert not (partial / LOCK).exists()
    for folder in (out, tmp_path / "whole"):
        done = run_builder(PROGRAMS / "build_data_set.py", proteins, folder)
        assert done.returncode == 0, done.stderr
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("job", "restart", "is_taken"),
    [("main/12", 0, True), ("main/12", 1, False), ("other/12", 0, False), (None, 0, False)],
)
def test_a_requeued_job_takes_over_its_own_lock(locked, monkeypatch, job, restart, is_taken):
    """On any machine: the earlier start is dead, unless it is another step of the same start."""
    for name, value in {"JOB_ID": "12", "CLUSTER_NAME": "main", "RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    lost = {"host": "elsewhere", "pid": 1, "since": SINCE, "start": "0"}
    folder = locked(**lost, job=job, restart=restart).with_name("data.partial")
    if is_taken:
        BuildLock(folder)
        fields = json.loads((folder / LOCK).read_text())
        assert (fields["pid"], fields["job"], fields["restart"]) == (os.getpid(), "main/12", 1)
    else:
        with pytest.raises(OutputError, match="--break-lock"):
            BuildLock(folder)


def test_a_process_that_lost_its_lock_writes_nothing_more(tmp_path):
    lock = BuildLock(tmp_path)
    lock.check()
    other = {"host": "elsewhere", "pid": 1, "since": SINCE, "start": None}
    (tmp_path / LOCK).write_text(json.dumps(other))
    assert not lock.is_held
    with pytest.raises(OutputError, match="process 1 on elsewhere"):
        lock.check()


@pytest.mark.parametrize("fault", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES])
def test_a_disk_that_fails_for_a_moment_does_not_take_the_lock(tmp_path, monkeypatch, fault):
    lock = BuildLock(tmp_path)

    def fail(path, **options):
        raise OSError(fault, os.strerror(fault), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        lock.check()
    (tmp_path / LOCK).unlink()
    with pytest.raises(OutputError, match="is gone"):
        lock.check()


def test_a_builder_that_lost_its_lock_writes_no_more_files(tmp_path, proteins):
    out = tmp_path / "data"
    lock = out.with_name("data.partial") / LOCK

    class Robbed(HashSplitLike):
        def split_of(self, record, digest):
            if record.identifier == "P7":
                fields = {"host": "elsewhere", "pid": 1, "since": "", "start": ""}
                lock.write_text(json.dumps(fields))
            return "train"

    with pytest.raises(OutputError, match="elsewhere"):
        prepare([proteins], out, split_rule=Robbed())
    assert lock.is_file()
    assert not out.exists()
    assert not list(lock.parent.glob("data/*/*")), "it wrote to a folder of another builder"


class HashSplitLike:
    """A split rule for tests."""

    def notes_of(self, record, split):
        return ()

    def describe(self):
        return {}


def test_a_process_that_lost_its_lock_publishes_nothing(tmp_path):
    """Otherwise, both builders would publish a data set."""
    out, other = tmp_path / "data", {"host": "elsewhere", "pid": 1, "since": "", "start": ""}
    with (
        pytest.raises(OutputError, match="process 1 on elsewhere"),
        work_folder(out, Plan([], {}, {})) as work,
    ):
        (work.path / LOCK).write_text(json.dumps(other))
    assert not out.exists()
    assert json.loads((tmp_path / "data.partial" / LOCK).read_text()) == other


def test_a_count_of_restarts_that_is_no_number_is_none(monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "x")
    assert lock.LockOwner.this_process().restart == 0
