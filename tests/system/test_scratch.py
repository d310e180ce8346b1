"""Scratch folders of processes: what a kill leaves is removed, and nothing else."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from protlm.system import paths
from protlm.system.shares import in_order
from protlm.system.work_folder import Kind, work_folder

ROOT = str(Path(__file__).resolve().parents[2])
# Has a scratch folder until it is killed: for results in a work folder, or in TMPDIR.
WORK = """
import sys
from pathlib import Path
from tempfile import gettempdir
from protlm.system.shares import in_order
from protlm.system.work_folder import Kind, work_folder

with work_folder(Path(sys.argv[1]), {}, Kind("x", "x", "x")) as work:
    (work.path / "part").touch()
    where = work.path if sys.argv[2] == "work" else Path(gettempdir())
    for _ in in_order(bytes, ((n, 1 << 14) for n in range(10**6)), 2, where):
        print(flush=True)
"""


@pytest.mark.parametrize("where", ["work", "TMPDIR"])
def test_the_scratch_folder_of_a_killed_group_is_removed(where, tmp_path, monkeypatch):
    """By the next start of the work; that of another running command stays."""
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    environment = {**os.environ, "PYTHONPATH": ROOT, "TMPDIR": str(temporary)}
    with contextlib.ExitStack() as stack:
        for name in ("killed", "running"):
            command = [sys.executable, "-c", WORK, tmp_path / name, where]
            started = {"stdout": subprocess.PIPE, "env": environment, "start_new_session": True}
            process = stack.enter_context(subprocess.Popen(command, **started))
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            if name == "killed":
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                left = list(tmp_path.rglob(".protlm-workers*"))
                assert len(left) == 1
            else:
                stack.callback(os.killpg, process.pid, signal.SIGKILL)
        own = {"work": {tmp_path / name for name in ("killed", "running")}}.get(where, {temporary})
        assert {one.parent for one in tmp_path.rglob(".protlm-workers*")} == own
        with work_folder(tmp_path / "killed", {}, Kind("x", "x", "x")) as work:
            assert [*in_order(abs, iter([(0, 0), (1, -1)]), 2, temporary)] == [(0, 0), (1, 1)]
            assert (work.path / "part").exists()
        (kept,) = tmp_path.rglob(".protlm-workers*")
        assert kept not in left


def test_the_scratch_files_of_another_container_stay(tmp_path, monkeypatch):
    """Its processes seem dead here, if the machines have one name and a folder is shared."""
    for token, space in (("far_away", tmp_path), ("seenhere", tmp_path.parent)):
        monkeypatch.setattr(paths, "_PID_NAMESPACE", space, raising=False)
        # The number of no process.
        paths._temporary(tmp_path / "x", 999_999_999, token).touch()
    paths.scratch_name("x", tmp_path)
    assert [path.name.split(".")[-2] for path in tmp_path.iterdir()] == ["far_away"]
