"""A full or read-only disk ends a build with one sentence; it resumes when there is space."""

import os
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
BUILD = PROGRAMS / "build.py"


def assert_one_sentence(done: "subprocess.CompletedProcess[str]", out: Path) -> None:
    """Exit 4 and a sentence: no traceback, and no signal such as a segmentation fault."""
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("protlm: ")]
    assert f"{out}" in told
    assert "no space left" in told


def test_finished_segments_are_kept_and_the_build_resumes(
    run_builder, proteins, tmp_path, contents, small_disk
):
    """On a disk of 600 KiB; where no disk can be mounted, with a limit on the size of files."""
    run_builder(BUILD, proteins, tmp_path / "whole")
    with small_disk(tmp_path / "disk", "600k") as is_mounted:
        out = tmp_path / "disk" / "data"
        limits = [] if is_mounted else ["largest_file=50000"]
        done = run_builder(BUILD, proteins, out, *limits)
        assert_one_sentence(done, out)
        assert not out.exists()
        partial = out.with_name("data.partial")
        if is_mounted:
            assert [p for p in partial.rglob("*") if p.name.endswith(".part")] == []
            assert len(list(partial.glob("journal/segment-*.json"))) > 2
            assert f"finished parts are kept in {partial}" in done.stderr
            assert (partial / "data/train/shard-00000.h5").is_file()
            again = run_builder(BUILD, proteins, out)
            assert_one_sentence(again, out)
            assert "resuming" in again.stderr
            remount = ["mount", "-o", "remount,size=64m", out.parent]
            subprocess.run(remount, check=True)
        assert run_builder(BUILD, proteins, out).returncode == 0
        assert contents(out) == contents(tmp_path / "whole")
        assert sorted(p.name for p in out.parent.iterdir()) == ["data"]


@pytest.mark.parametrize("limit", [0, 2_000])
def test_no_files_are_left_if_no_segment_was_finished(run_builder, proteins, tmp_path, limit):
    out = tmp_path / "new" / "data"
    assert_one_sentence(run_builder(BUILD, proteins, out, f"largest_file={limit}"), out.parent)
    assert not out.parent.exists() or list(out.parent.iterdir()) == []


def test_a_full_disk_is_reported_when_digests_are_written(run_builder, tmp_path):
    source, out = tmp_path / "short.fasta", tmp_path / "new" / "data"
    letters = "ACDEFGHIKLMNPQRSTVWY"
    words = product(letters, letters, letters)
    source.write_text("".join(f">{i}\nMKV{''.join(word)}\n" for i, word in enumerate(words)))
    done = run_builder(BUILD, source, tmp_path / "whole", "in_quarters")
    assert done.returncode == 0, done.stderr
    largest = max(path.stat().st_size for path in (tmp_path / "whole").rglob("*.h5"))
    assert largest < 120_000 < 8_000 * 16
    done = run_builder(BUILD, source, out, "in_quarters", "largest_file=120000")
    assert_one_sentence(done, out.parent)
    assert list(out.parent.iterdir()) == []


def test_a_table_of_digests_that_does_not_fit_is_an_error_not_a_crash(run_builder, tmp_path):
    """Space is allocated when the table is created: a mapped sparse file would cause SIGBUS."""
    done = run_builder(PROGRAMS / "fill_digest_table.py", tmp_path / "table")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] in {"27", "28"}


def test_a_large_shard_fills_a_disk_of_16_mib(run_builder, tmp_path, small_disk):
    source = tmp_path / "large.fasta"
    with source.open("w") as file:
        for i in range(400):
            file.write(f">p{i}\n{'ACDEFGHIKLMNPQRSTVWY' * 2_500}\n")
    with small_disk(tmp_path / "disk", "16m") as is_mounted:
        out = tmp_path / "disk" / "data"
        limits = [] if is_mounted else [f"largest_file={16 << 20}"]
        done = run_builder(BUILD, source, out, "one_shard", *limits)
        assert_one_sentence(done, out.parent)
        assert list(out.parent.iterdir()) == []
    shutil.rmtree(tmp_path / "disk")


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
        done = run_builder(BUILD, proteins, out, "as_nobody", cwd="/")
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
    done = run_builder(BUILD, proteins, folder / "data", "as_nobody", cwd="/")
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
