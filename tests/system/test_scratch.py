"""Scratch folders of processes: what a kill leaves is removed, and nothing else."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from protlm.system.shares import in_order
from protlm.system.work_folder import Kind, work_folder

ROOT = str(Path(__file__).resolve().parents[2])
# Passes results through a scratch folder until it is killed: in a work folder, or by default.
WORK = """
import sys
from pathlib import Path
from protlm.system.shares import in_order
from protlm.system.work_folder import Kind, work_folder

with work_folder(Path(sys.argv[1]), {}, Kind("x", "x", "x")) as work:
    (work.path / "part").touch()
    where = work.path if sys.argv[2] == "work" else None
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
            assert [*in_order(abs, ((n, -n) for n in range(3)), 2)] == [(0, 0), (1, 1), (2, 2)]
            assert (work.path / "part").exists()
        (kept,) = tmp_path.rglob(".protlm-workers*")
        assert kept not in left
