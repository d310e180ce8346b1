"""F19: the lock of a dead builder is explained, and taken over where that is safe."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.lock import LOCK, Builder, BuildLock
from data_prep.prepare import PrepareOptions, prepare
from data_prep.split import HashSplit
from protlm.errors import OutputError

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


def test_another_process_with_the_same_number_is_not_taken_for_the_dead_one(locked, proteins):
    out = locked(host=socket.gethostname(), pid=os.getpid(), since=SINCE, start="another time")
    prepare([proteins], out, split_rule=RULE)
    assert out.is_dir()


def test_a_living_process_is_never_taken_over(locked, proteins):
    me = Builder.this_process()
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
    ],
)
def test_a_lock_of_another_machine_is_explained_and_broken_on_request(locked, proteins, fields):
    out = locked(**fields)
    with pytest.raises(OutputError, match="--break-lock"):
        prepare([proteins], out, split_rule=RULE)
    assert (out.with_name("data.partial") / LOCK).is_file()
    prepare([proteins], out, split_rule=RULE, options=PrepareOptions(break_lock=True))
    assert [path.name for path in out.parent.iterdir()] == ["data"]


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
            lock.write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": "", "start": ""}))
            return "train"

    with pytest.raises(OutputError, match="elsewhere"):
        prepare([proteins], out, split_rule=Robbed())
    assert lock.is_file()
    assert not out.exists()


class HashSplitLike:
    """A split rule to be spoilt."""

    def notes_of(self, record, split):
        return ()

    def describe(self):
        return {}
