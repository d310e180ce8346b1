"""An output that cannot be written is refused before any input is read."""

import os
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "build.py"


def open_for_all(folder):
    """Makes the folder of the test accessible to all users."""
    for parent in [folder, *folder.parents]:
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)


def test_a_read_only_folder_is_refused_first(run_builder, proteins, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    open_for_all(tmp_path)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    for out in (locked / "data", locked / "new" / "data", closed / "data"):
        done = run_builder(PROGRAM, proteins, out, "as_nobody", cwd="/")
        assert done.returncode == 4, done.stderr
        assert f"{out} cannot be written" in done.stderr
        assert "Traceback" not in done.stderr
    assert list(locked.iterdir()) == []


def test_a_read_only_work_folder_is_refused_first(run_builder, proteins, tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    (folder / "data.partial").mkdir(mode=0o555)
    folder.chmod(0o777)
    open_for_all(tmp_path)
    open_for_all(proteins.parent)
    done = run_builder(PROGRAM, proteins, folder / "data", "as_nobody", cwd="/")
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
