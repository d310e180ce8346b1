"""The lock of a dead process is explained, and taken over where that is safe."""

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
from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.data_prep.prepare import prepare
from protlm.data_prep.split import HashSplit
from protlm.system import lock as module
from protlm.system.errors import OutputError
from protlm.system.lock import LOCK, FolderLock
from tests.marks import slow_but

PROGRAMS = Path(__file__).parent / "programs"
BUILD = PROGRAMS / "build.py"
HERE, SINCE = socket.gethostname(), "2026-01-01T00:00:00+00:00"
OTHER = {"host": "elsewhere", "pid": 1, "since": SINCE}
JOB = {**OTHER, "job": "main/12"}
fork = multiprocessing.get_context("fork")


def locked(folder: Path, *, break_lock: bool = False) -> FolderLock:
    return FolderLock(folder, "being built", "--out", break_lock=break_lock)


def refuse_flock(monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        pytest.param({"host": HERE, "pid": 2**22, "since": SINCE}, f"process {2**22}", id="dead"),
        pytest.param({"host": HERE, "pid": os.getpid(), "since": SINCE}, "process", id="reused"),
        pytest.param({**JOB, "restart": 0}, "process 1 on elsewhere", id="requeued"),
        pytest.param(None, None, id="killed while it locked"),
    ],
)
def test_the_lock_of_a_dead_process_is_taken_over(content, name, tmp_path, monkeypatch, capsys):
    """Also of another process with its process ID; and on any machine by its requeued job."""
    for variable, value in {"JOB_ID": "12", "CLUSTER_NAME": "main", "RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(f"SLURM_{variable}", value)
    (tmp_path / LOCK).write_text("" if content is None else json.dumps(content))
    lock = locked(tmp_path)
    told = capsys.readouterr().err
    assert f"taking over from {name}" in told if name else not told
    owner = json.loads((tmp_path / LOCK).read_text())
    assert (owner["pid"], owner["job"], owner["restart"]) == (os.getpid(), "main/12", 1)
    lock.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (json.dumps(OTHER), "process 1 on elsewhere"),
        # Another step of the same start of a job, another job, and none.
        (json.dumps({**JOB, "restart": 1}), "process 1 on elsewhere"),
        (json.dumps({**JOB, "job": "other/12", "restart": 0}), "process 1 on elsewhere"),
        (json.dumps({**JOB, "job": None, "restart": 0}), "process 1 on elsewhere"),
        (json.dumps({**JOB, "restart": "0"}), "an unknown process"),
        ('{"host": "elsewhere"}', "an unknown process"),
        ('{"pid": "none", "host": 7}', "an unknown process"),
        ("[" * 10**5, "an unknown process"),
        ("3", "an unknown process"),
        ("\udcff", "an unknown process"),
    ],
)
def test_a_lock_of_another_machine_is_explained_and_broken_on_request(
    content, name, tmp_path, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "main")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (tmp_path / LOCK).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(OutputError, match=f"is locked by {name}.* with --break-lock"):
        locked(tmp_path)
    assert (tmp_path / LOCK).read_bytes() == content.encode(errors="surrogateescape")
    assert locked(tmp_path, break_lock=True).is_held


@pytest.mark.parametrize("fault", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_flock(tmp_path, monkeypatch, fault):
    """There only the lock file shows that another process may be writing."""
    refuse_flock(monkeypatch, fault)
    first = locked(tmp_path)
    with pytest.raises(OutputError, match=f"by process {os.getpid()} on .*--break-lock"):
        locked(tmp_path)
    assert first.is_held
    first.release()
    assert not list(tmp_path.iterdir())
    (tmp_path / LOCK).write_text(json.dumps(OTHER))
    assert locked(tmp_path, break_lock=True).is_held


def test_a_file_system_that_locks_only_files_open_for_writing(tmp_path, monkeypatch):
    """NFS does so."""
    lock_file = fcntl.flock

    def as_nfs(file: int, how: int) -> None:
        if not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_RDWR:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        lock_file(file, how)

    monkeypatch.setattr(fcntl, "flock", as_nfs)
    assert locked(tmp_path).is_held
    refuse_flock(monkeypatch, errno.EBADF)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        locked(tmp_path)


def test_a_lock_file_that_is_removed_while_it_is_locked_is_created_again(tmp_path, monkeypatch):
    """The previous owner removes it between `open` and `flock`."""
    lock_file, removed = fcntl.flock, []

    def remove_and_lock(*arguments: int) -> None:
        if not removed:
            removed.append((tmp_path / LOCK).unlink())
        lock_file(*arguments)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    assert locked(tmp_path).is_held
    assert len(removed) == 1


def test_a_running_process_is_never_taken_over(tmp_path):
    held = locked(tmp_path)
    before = (tmp_path / LOCK).read_bytes()
    for break_lock in (False, True):
        told = f"is being built by process {os.getpid()} on .*: wait .* another --out"
        with pytest.raises(OutputError, match=told):
            locked(tmp_path, break_lock=break_lock)
    assert (tmp_path / LOCK).read_bytes() == before
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
    locked(tmp_path).release()
    assert f"taking over from process {holder.pid} on" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.pidns
def test_a_process_in_another_container_keeps_the_lock(start_holder, tmp_path):
    """Its process ID, 1, belongs to another process here."""
    start_holder("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    for break_lock in (False, True):
        with pytest.raises(OutputError, match="is being built by process 1 on"):
            locked(tmp_path, break_lock=break_lock)


def started(*functions: Callable[[], None]) -> list:
    """Runs each function in a forked process."""
    processes = [fork.Process(target=function) for function in functions]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in processes:
            process.start()
    return processes


def test_the_children_of_a_killed_process_do_not_keep_the_lock(tmp_path):
    """Workers end some time after their parent."""
    released, ready = fork.Event(), fork.Event()

    def hold() -> None:
        locked(tmp_path)
        if not os.fork():
            ready.set()
            released.wait(60)
            os._exit(0)
        signal.pause()

    (holder,) = started(hold)
    try:
        assert ready.wait(60)
        holder.kill()
        holder.join()
        locked(tmp_path).release()
    finally:
        released.set()


def test_of_two_processes_one_takes_over(tmp_path, monkeypatch):
    """Both start while the first still reads the lock file."""
    (tmp_path / LOCK).write_text(json.dumps({**OTHER, "host": HERE}))
    read = module._owner_of

    def read_slowly(path: Path) -> object:
        time.sleep(0.3)
        return read(path)

    def take() -> None:
        try:
            locked(tmp_path)
        except OutputError:
            os._exit(7)
        time.sleep(1.5)
        os._exit(0)

    monkeypatch.setattr(module, "_owner_of", read_slowly)
    both = started(take, take)
    for process in both:
        process.join()
    assert sorted(process.exitcode for process in both) == [0, 7]


@pytest.mark.parametrize(
    "moment", slow_but(["fcntl.flock", "os.fstat", "Path.write_text"], "fcntl.flock")
)
@pytest.mark.parametrize("mode", slow_but(["a", "w"], "w"))
def test_a_builder_killed_while_it_locks_does_not_keep_the_lock(
    run_builder, proteins, tmp_path, moment, mode
):
    """The same command continues after a kill at any moment, without --break-lock."""
    out = tmp_path / "data"
    killed = run_builder(BUILD, proteins, out, f"kill_while_locking={moment}:{mode}")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "data.partial" / LOCK).read_bytes() == b""
    done = run_builder(BUILD, proteins, out)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_job_that_a_cluster_terminates_releases_its_lock(
    run_builder, proteins, tmp_path, contents
):
    """It may resume on another machine, which cannot check whether the owner is running."""
    out = tmp_path / "data"
    done = run_builder(BUILD, proteins, out, "terminate=20")
    assert done.returncode == 130, done.stderr
    assert "protlm: interrupted" in done.stderr
    partial = out.with_name("data.partial")
    assert (partial / "journal" / "segment-00003.json").exists()
    assert not (partial / LOCK).exists()
    for folder in (out, tmp_path / "whole"):
        done = run_builder(BUILD, proteins, folder)
        assert done.returncode == 0, done.stderr
    assert contents(out) == contents(tmp_path / "whole")


def test_a_process_that_lost_its_lock_stops(tmp_path):
    lock = locked(tmp_path)
    lock.check()
    (tmp_path / LOCK).write_text(json.dumps(OTHER))
    assert not lock.is_held
    with pytest.raises(OutputError, match="now belongs to process 1 on elsewhere"):
        lock.check()
    lock.release()
    assert json.loads((tmp_path / LOCK).read_text()) == OTHER


@pytest.mark.parametrize("fault", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES])
def test_a_disk_that_fails_for_a_moment_does_not_take_the_lock(tmp_path, monkeypatch, fault):
    lock = locked(tmp_path)

    def fail(path: Path) -> bytes:
        raise OSError(fault, os.strerror(fault), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        lock.check()
    (tmp_path / LOCK).unlink()
    with pytest.raises(OutputError, match="is gone"):
        lock.check()


def test_a_builder_that_lost_its_lock_writes_no_more_files(tmp_path, proteins, monkeypatch):
    out = tmp_path / "data"
    lock = out.with_name("data.partial") / LOCK
    split_of = HashSplit.split_of

    def rob(self, record, digest):
        if record.identifier == "P7":
            lock.write_text(json.dumps(OTHER))
        return split_of(self, record, digest)

    monkeypatch.setattr(HashSplit, "split_of", rob)
    with pytest.raises(OutputError, match="elsewhere"):
        prepare([proteins], out, split_rule=HashSplit(0, 0))
    assert lock.is_file()
    assert not out.exists()
    assert not list(lock.parent.glob("data/*/*")), "it wrote to a folder of another builder"


@pytest.mark.parametrize("command", slow_but(["prepare", "embed", "finetune", "train"], "prepare"))
def test_a_command_breaks_a_lock_on_request(
    command, protlm_in_process, tiny_run, tiny_data, tmp_path
):
    records = "".join(f">P{n}\nMKV{'LAW' * (n % 9)}{'WC' * (n % 7)}\n" for n in range(60))
    (tmp_path / "x.fasta").write_text(records)
    splits = ("train", "valid", "test")
    rows = [f"P{n}\t{'WC' * (n % 7 + 1)}MK\tc{n % 2}\t{splits[n % 3]}\n" for n in range(60)]
    (tmp_path / "labels.tsv").write_text("".join(["identifier\tsequence\tlabel\tsplit\n", *rows]))
    settings = ["model=tiny", f"data.dir={tiny_data}", "data.max_length=128"]
    settings += ["trainer.max_steps=2", "trainer.accelerator=cpu"]
    arguments, folder = {
        "prepare": (["x.fasta", "--out", "data"], "data.partial"),
        "embed": (["x.fasta", "-m", tiny_run, "-o", "out.h5"], "out.h5.partial"),
        "finetune": (["labels.tsv", "-m", tiny_run, "-o", "run", "--epochs", "1"], "run"),
        "train": (["run_dir=run", *settings], "run"),
    }[command]
    (tmp_path / folder).mkdir()
    (tmp_path / folder / LOCK).write_text(json.dumps(OTHER))
    done = protlm_in_process(command, *arguments, cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "process 1 on elsewhere" in done.stderr and "--break-lock" in done.stderr
    done = protlm_in_process(command, *arguments, "--break-lock", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / folder / LOCK).exists()


def test_a_count_of_restarts_that_is_no_number_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "x")
    locked(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text())["restart"] == 0
