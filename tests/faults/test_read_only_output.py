"""An output that cannot be written is refused before any input is read."""

import os

# Root may write anywhere, so the builder changes to an unprivileged user after its imports.
AS_NOBODY = """
import os
import protlm.data_prep.sources

class Unread:
    def __init__(self, *arguments):
        raise AssertionError("the input was read")

protlm.data_prep.sources.SequenceFile = Unread
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
exit_with_message(lambda: build(sys.argv[1:2], sys.argv[2]))
"""


def open_for_all(folder):
    """Lets everybody enter the folder of the test."""
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
        done = run_builder(AS_NOBODY, proteins, out, cwd="/")
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
    done = run_builder(AS_NOBODY, proteins, folder / "data", cwd="/")
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
