"""Shards that are truncated, missing, extra or swapped are listed and rejected."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.data.shards.data_set import open_split, verify
from protlm.system.errors import InputDataError

SHARD = "train/shard-00001.h5"


def assert_found(directory: Path, shard: str = SHARD, *, how: tuple[str, ...] = ("full",)) -> None:
    """Asserts that verification and opening the split name the shard."""
    name = re.escape(str(directory / shard))
    for verify_by in how:
        with pytest.raises(InputDataError, match=f"{name}.*protlm data verify"):
            open_split(directory, "train", verify=verify_by)
    assert any(re.search(name, fault) for fault in verify(directory))


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_truncated_shard(data_set: Path, size: int) -> None:
    path = data_set / SHARD
    path.write_bytes(path.read_bytes()[:size])
    assert_found(data_set, how=("full", "sizes"))


def test_a_longer_shard(data_set: Path) -> None:
    path = data_set / SHARD
    path.write_bytes(path.read_bytes() + b"\0")
    assert_found(data_set, how=("full", "sizes"))


def test_a_shard_that_is_cut_short_while_training_runs(data_set: Path) -> None:
    reader = open_split(data_set, "train")
    path = data_set / SHARD
    path.write_bytes(path.read_bytes()[:-1])
    assert len(reader[0])
    with pytest.raises(InputDataError, match=re.escape(str(path))):
        reader[16]


def test_a_missing_shard(data_set: Path) -> None:
    (data_set / SHARD).unlink()
    assert_found(data_set, how=("full", "sizes"))


def test_a_folder_in_place_of_a_shard(data_set: Path) -> None:
    (data_set / SHARD).unlink()
    (data_set / SHARD).mkdir()
    assert_found(data_set, how=("full", "sizes"))


def test_swapped_shards(make_data_set: Callable[..., Path]) -> None:
    # The same lengths in another order, so that only the content differs.
    directory = make_data_set([(f"P{i:02}", "MKVL"[i % 4] * 9) for i in range(32)])
    one, other, aside = directory / "train/shard-00000.h5", directory / SHARD, directory / "x"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    assert one.stat().st_size == other.stat().st_size
    assert_found(directory, "train/shard-00000.h5")
    assert len(verify(directory)) == 2


def test_an_extra_file(data_set: Path) -> None:
    extra = data_set / "train" / "shard-00003.h5"
    shutil.copy(data_set / SHARD, extra)
    assert verify(data_set) == [f"{extra} is not in the manifest"]


def test_all_faults_are_listed(data_set: Path) -> None:
    (data_set / SHARD).unlink()
    (data_set / "valid" / "shard-00000.h5").write_bytes(b"")
    (data_set / "notes.txt").touch()
    assert len(verify(data_set)) == 3
