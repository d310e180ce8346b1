"""F19: the lock of a dead builder is explained, and taken over where that is safe."""

import errno
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

from data_prep.lock import BuildLock
from data_prep.prepare import PrepareOptions, prepare
from data_prep.split import HashSplit
from data_prep.work_folder import Plan, work_folder
from protlm import lock
from protlm.errors import OutputError
from protlm.lock import LOCK, Holder

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


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_dead_process_of_this_machine_is_taken_over(locked, proteins, capsys):
    out = locked(host=socket.gethostname(), pid=dead_process(), since=SINCE, start="0")
    prepare([proteins], out, split_rule=RULE)
    assert "taking over from process" in capsys.readouterr().err
    assert [path.name for path in out.parent.iterdir()] == ["data"]


def test_what_is_tidied_up_by_another_is_written_again(tmp_path, monkeypatch):
    """The builder that has the lock sweeps its folder while the next one writes."""
    sync, swept = os.fsync, []

    def sync_and_sweep(descriptor):
        sync(descriptor)
        if not swept:
            swept.extend(path.unlink() for path in tmp_path.iterdir())

    monkeypatch.setattr(os, "fsync", sync_and_sweep)
    BuildLock(tmp_path)
    assert len(swept) == 1
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_of_two_processes_one_takes_over(locked, monkeypatch):
    """Both have seen that the holder is dead before one of them has the lock."""
    out = locked(host=socket.gethostname(), pid=dead_process(), since=SINCE, start="0")
    who = lock._who

    def who_after_a_while(holder):
        time.sleep(0.3)
        return who(holder)

    def take():
        try:
            BuildLock(out.with_name("data.partial"))
        except OutputError:
            os._exit(7)
        time.sleep(1.5)
        os._exit(0)

    monkeypatch.setattr(lock, "_who", who_after_a_while)
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=take) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in both:
            process.start()
    for process in both:
        process.join()
    assert sorted(process.exitcode for process in both) == [0, 7]


def test_another_process_with_the_same_number_is_not_taken_for_the_dead_one(locked, proteins):
    out = locked(host=socket.gethostname(), pid=os.getpid(), since=SINCE, start="another time")
    prepare([proteins], out, split_rule=RULE)
    assert out.is_dir()


def test_a_living_process_is_never_taken_over(locked, proteins):
    me = Holder.this_process()
    fields = {"host": me.host, "pid": me.pid, "since": SINCE, "start": me.start}
    out = locked(**fields)
    for break_lock in (False, True):
        with pytest.raises(OutputError, match=f"process {me.pid} on {me.host} since"):
            prepare([proteins], out, split_rule=RULE, options=PrepareOptions(break_lock=break_lock))
    assert json.loads((out.with_name("data.partial") / LOCK).read_text()) == fields


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "elsewhere", "pid": 1, "since": SINCE, "start": "0"},
        {"host": "elsewhere"},
        {"pid": "none", "host": 7},
        {"host": socket.gethostname(), "pid": "none", "since": SINCE, "start": "0"},
        {"host": socket.gethostname(), "pid": 0, "since": SINCE, "start": "0"},
        {"host": socket.gethostname(), "pid": 10**30, "since": SINCE, "start": "0"},
    ],
)
def test_a_lock_of_another_machine_is_explained_and_broken_on_request(locked, proteins, fields):
    out = locked(**fields)
    with pytest.raises(OutputError, match="--break-lock"):
        prepare([proteins], out, split_rule=RULE)
    assert (out.with_name("data.partial") / LOCK).is_file()
    prepare([proteins], out, split_rule=RULE, options=PrepareOptions(break_lock=True))
    assert [path.name for path in out.parent.iterdir()] == ["data"]


@pytest.mark.parametrize("moment", ["json.dump", "os.fsync", "os.link"])
def test_a_builder_killed_while_it_locks_is_no_hindrance(run_builder, proteins, tmp_path, moment):
    """The same command goes on after a kill at any moment, without --break-lock."""
    killed = f"""
import os, signal
from protlm.lock import json, os
{moment} = lambda *arguments, **named: os.kill(os.getpid(), signal.SIGKILL)
build(sys.argv[1:2], sys.argv[2])
"""
    out = tmp_path / "data"
    assert run_builder(killed, proteins, out).returncode == -signal.SIGKILL
    done = run_builder("build(sys.argv[1:2], sys.argv[2])", proteins, out)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("fault", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_that_knows_no_links(tmp_path, monkeypatch, fault):
    def refuse(*names):
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(os, "link", refuse)
    lock = BuildLock(tmp_path)
    assert lock.is_held
    with pytest.raises(OutputError, match=f"is being built by process {os.getpid()} on"):
        BuildLock(tmp_path)
    lock.release()
    assert not list(tmp_path.iterdir())


def test_who_comes_second_leaves_the_lock_of_the_first(tmp_path, monkeypatch):
    """Where a file system knows no locks, another may come between the look and the file."""
    BuildLock(tmp_path)
    before = (tmp_path / LOCK).read_bytes()
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(OutputError, match=f"is being built by process {os.getpid()} on"):
        BuildLock(tmp_path)
    assert (tmp_path / LOCK).read_bytes() == before


TOLD_TO_END = """
import os, signal
from data_prep.encode import Encoder

work, begun = Encoder.__call__, []

def end(encoder, block):
    begun.append(block)
    if len(begun) == 20:
        os.kill(os.getpid(), signal.SIGTERM)
    return work(encoder, block)

Encoder.__call__ = end
exit_with_message(lambda: build(sys.argv[1:2], sys.argv[2]))
"""


def test_a_job_that_a_cluster_ends_gives_its_lock_back(run_builder, proteins, tmp_path, contents):
    """It may go on on another machine, from where the lock could not be judged."""
    out = tmp_path / "data"
    done = run_builder(TOLD_TO_END, proteins, out)
    assert done.returncode == 130, done.stderr
    assert "protlm: interrupted" in done.stderr
    partial = out.with_name("data.partial")
    assert (partial / "journal" / "segment-00003.json").exists()
    assert not (partial / LOCK).exists()
    again = "build(sys.argv[1:2], sys.argv[2]); build(sys.argv[1:2], sys.argv[3])"
    done = run_builder(again, proteins, out, tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("job", "restart", "is_taken"),
    [("main/12", 0, True), ("main/12", 1, False), ("other/12", 0, False), (None, 0, False)],
)
def test_a_job_that_slurm_began_again_takes_over_from_itself(
    locked, monkeypatch, job, restart, is_taken
):
    """On whatever machine it began again; the run before is dead, unless it is a step beside it."""
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


def test_who_lost_the_lock_writes_nothing_more(tmp_path):
    lock = BuildLock(tmp_path)
    lock.check()
    other = {"host": "elsewhere", "pid": 1, "since": SINCE, "start": None}
    (tmp_path / LOCK).write_text(json.dumps(other))
    assert not lock.is_held
    with pytest.raises(OutputError, match="process 1 on elsewhere"):
        lock.check()


def test_a_builder_that_lost_its_lock_leaves_everything_to_the_other(tmp_path, proteins):
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
    assert not list(lock.parent.glob("data/*/*")), "it wrote where another one builds"


class HashSplitLike:
    """A split rule to be spoilt."""

    def notes_of(self, record, split):
        return ()

    def describe(self):
        return {}


def test_who_lost_the_lock_gives_nothing_its_name(tmp_path):
    """Both builders would give the data set its name, each without looking at the other's."""
    out, other = tmp_path / "data", {"host": "elsewhere", "pid": 1, "since": "", "start": ""}
    with (
        pytest.raises(OutputError, match="process 1 on elsewhere"),
        work_folder(out, Plan([], {}, {})) as work,
    ):
        (work.path / LOCK).write_text(json.dumps(other))
    assert not out.exists()
    assert json.loads((tmp_path / "data.partial" / LOCK).read_text()) == other
