"""Sources are found by their names, each once, however many there are."""

import os
from pathlib import Path

import pytest

from protlm.data_prep.sources import find_sources, list_files, refuse_inside
from protlm.system.errors import InputDataError, UserError


def test_an_output_among_the_sources_is_rejected(tmp_path):
    """The unfinished output would be a source when the build resumes."""
    (tmp_path / "a.fasta").write_text(">a\nMKV\n")
    for out in (tmp_path / "data", tmp_path / ".." / tmp_path.name / "data"):
        with pytest.raises(UserError, match=r"is inside .*choose another folder"):
            refuse_inside([tmp_path], out)
    refuse_inside([tmp_path / "a.fasta"], tmp_path / "data")
    refuse_inside([tmp_path], tmp_path / "made" / "data")


def test_every_file_is_looked_up_once(tmp_path, monkeypatch):
    """Thousands of files on a network file system: the work must not grow with their square."""
    for number in range(200):
        (tmp_path / f"{number:03d}.fasta").touch()
    looked_up = []
    real = os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path: looked_up.append(path) or real(path))
    assert list_files([tmp_path]) == sorted(tmp_path.iterdir())
    assert len(looked_up) == 200


def test_hidden_files_of_a_folder_are_ignored(tmp_path):
    for name in ("a.fasta", ".DS_Store"):
        (tmp_path / name).touch()
    assert list_files([tmp_path]) == [tmp_path / "a.fasta"]
    (tmp_path / "a.fasta").unlink()
    with pytest.raises(InputDataError, match="is empty"):
        list_files([tmp_path])


@pytest.mark.parametrize("again", ["a.fasta", "folder/../a.fasta", "link.fasta", "folder"])
def test_a_file_by_two_names_is_one_file(tmp_path, again):
    (tmp_path / "a.fasta").touch()
    (tmp_path / "folder").mkdir()
    for link in ("link.fasta", "folder/b.fasta"):
        (tmp_path / link).symlink_to(tmp_path / "a.fasta")
    with pytest.raises(UserError, match=r"\.fasta is given twice"):
        list_files([tmp_path / "a.fasta", tmp_path / again])


def test_an_unreadable_folder_is_reported(tmp_path, monkeypatch):
    """Root may read any folder, so the error of the system is simulated."""
    (tmp_path / "a.fasta").touch()

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    for path in (tmp_path, tmp_path / "a.fasta"):
        with pytest.raises(InputDataError, match=f"{path} cannot be read: Permission denied"):
            find_sources([path])


def test_entries_that_are_not_files_are_named(tmp_path):
    (tmp_path / "loop.fasta").symlink_to("loop.fasta")
    with pytest.raises(InputDataError, match=r"loop\.fasta is not a file"):
        list_files([tmp_path])
    # A file that is named itself is checked when it is opened.
    assert list_files([tmp_path / "loop.fasta"]) == [tmp_path / "loop.fasta"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputDataError, match="empty is empty"):
        list_files([tmp_path / "empty"])
