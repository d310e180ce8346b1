"""A damaged checkpoint is named and never used; training resumes from the newest intact one."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import protlm
from protlm.checkpoints.checks import check_sum, damaged_files, sum_path, write_sums
from protlm.checkpoints.format import LATEST, all_checkpoints, latest
from protlm.commands.checkpoint import info, verify
from protlm.system.errors import InputDataError

SETTINGS = ("trainer.checkpoint_every=1", "trainer.log_every=1", "trainer.valid_every=2")


@pytest.fixture(scope="module")
def whole(train_tiny, tmp_path_factory) -> Path:
    """A run of four steps that keeps three checkpoints."""
    return train_tiny(tmp_path_factory.mktemp("runs") / "whole", *SETTINGS)


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def flip_a_bit(path: Path, rng: random.Random) -> None:
    contents = bytearray(path.read_bytes())
    contents[rng.randrange(len(contents))] ^= 1 << rng.randrange(8)
    path.write_bytes(contents)


def spoil(damage: Callable[[Path], object]) -> Callable[[Path], object]:
    """Damages the newest checkpoint."""
    return lambda run: damage(all_checkpoints(run)[-1])


def point(content: bytes) -> Callable[[Path], object]:
    return lambda run: (run / "checkpoints" / LATEST).write_bytes(content)


# What is damaged, and whether the newest checkpoint itself is.
DAMAGE = {
    "a flipped bit": (spoil(lambda path: flip_a_bit(path, random.Random(0))), True),
    "cut short": (spoil(lambda path: path.write_bytes(path.read_bytes()[:-1])), True),
    "empty": (spoil(lambda path: path.write_bytes(b"")), True),
    "gone": (spoil(lambda path: path.unlink()), True),
    "no sum": (spoil(lambda path: sum_path(path).unlink()), True),
    "an empty sum": (spoil(lambda path: sum_path(path).write_bytes(b"")), True),
    "no pointer": (lambda run: (run / "checkpoints" / LATEST).unlink(), False),
    "an empty pointer": (point(b""), False),
    "a pointer of other bytes": (point(b"\xff\xfe"), False),
    "a pointer elsewhere": (point(b"../../etc/passwd"), False),
    "a dangling pointer": (point(b"step-99999999.ckpt\n"), False),
}


@pytest.mark.parametrize(("damage", "is_newest"), DAMAGE.values(), ids=DAMAGE)
def test_no_other_model_is_used_silently(damage, is_newest, run):
    """The message names the checkpoint to use instead."""
    _, third, fourth = all_checkpoints(run)
    good = third if is_newest else fourth
    damage(run)
    with pytest.raises(InputDataError, match=f"the newest undamaged checkpoint is {good}"):
        protlm.load(run)
    assert protlm.load(good).hash


def test_training_resumes_from_the_newest_intact_checkpoint(
    run, whole, train_tiny, state_of, log_of
):
    """Steps 3 and 4 are repeated, are logged once, and replace the damaged checkpoints."""
    second, third, fourth = all_checkpoints(run)
    flip_a_bit(fourth, random.Random(0))
    sum_path(third).unlink()
    with pytest.warns(UserWarning) as warned:
        train_tiny(run, *SETTINGS)
    told = [str(warning.message) for warning in warned]
    assert len(told) == 2
    assert fourth.name in told[0] and third.name in told[1]
    assert all(f"resuming from {second}" in text for text in told)
    assert log_of(run) == log_of(whole)
    for path in all_checkpoints(whole):
        assert state_of(run / "checkpoints" / path.name) == state_of(path)
    verify(run)


def test_damaged_checkpoints_do_not_count_as_kept(run, train_tiny, killed_after):
    """After step 3 the checkpoint of step 2 is still there, beside the damaged one of step 4."""
    second, third, fourth = all_checkpoints(run)
    for path in (third, fourth):
        path.write_bytes(b"")
    damaged = fourth.stat().st_mtime_ns
    with pytest.warns(UserWarning), killed_after(3):
        train_tiny(run, *SETTINGS, "trainer.keep_checkpoints=2")
    assert all_checkpoints(run) == [second, third, fourth]
    assert latest(run) == third
    assert fourth.stat().st_mtime_ns == damaged
    protlm.load(run)


def test_without_an_intact_checkpoint_no_file_is_written_or_removed(run, train_tiny, contents):
    for path in all_checkpoints(run):
        flip_a_bit(path, random.Random(1))
    before = contents(run / "checkpoints"), (run / "metrics.csv").read_bytes()
    with pytest.raises(
        InputDataError, match=r"all checkpoints of .* are damaged.*step-00000002"
    ) as none:
        train_tiny(run, *SETTINGS)
    assert none.value.exit_code == 3
    assert (contents(run / "checkpoints"), (run / "metrics.csv").read_bytes()) == before


def test_verify_prints_the_state_of_every_checkpoint(run, capsys):
    second, third, fourth = all_checkpoints(run)
    verify(run)
    assert capsys.readouterr().out.count("good") == 3
    flip_a_bit(third, random.Random(2))
    with pytest.raises(InputDataError, match=r"step-00000003\.ckpt is damaged"):
        verify(run)
    assert capsys.readouterr().out.splitlines() == [
        f"{second}: good",
        f"{third}: damaged",
        f"{fourth}: good, the latest",
    ]
    (run / "checkpoints" / LATEST).unlink()
    with pytest.raises(InputDataError, match="latest is missing"):
        verify(run)


def test_info_names_the_best(run, capsys):
    info(run)
    told = capsys.readouterr().out
    best = next(line for line in told.splitlines() if line.startswith("best by valid_loss"))
    assert "step-00000004.ckpt" in best or "step-00000002.ckpt" in best


@pytest.mark.parametrize("number", [50, pytest.param(1_000, marks=pytest.mark.slow)])
def test_flipped_bits_are_refused(number, run):
    path, rng = all_checkpoints(run)[-1], random.Random(3)
    contents = path.read_bytes()
    for _ in range(number):
        flip_a_bit(path, rng)
        with pytest.raises(InputDataError):
            check_sum(path)
        path.write_bytes(contents)
    check_sum(path)


NAMES = ["/dev/zero", "../x", "..", "part/x", "pipe", "zero", "x" * 300]


@pytest.mark.parametrize("name", [*NAMES, "huge.json", "model.safetensors", "SHA256SUMS"])
def test_checksums_of_other_than_files_of_the_folder_are_refused(name, tmp_path):
    """None of them is read: a device has no end, and a pipe waits for its writer."""
    folder = tmp_path / "model"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n")
    if name in NAMES and name != "x" * 300:
        with pytest.raises(InputDataError, match=r"SHA256SUMS lists"):
            damaged_files(folder)
        return
    if name not in NAMES:
        (folder / name).touch()
        os.truncate(folder / name, 1 << 42)
    assert damaged_files(folder)


def test_a_table_of_any_length_may_lie_beside_weights(tmp_path):
    (tmp_path / "predictions.tsv").touch()
    os.truncate(tmp_path / "predictions.tsv", 1 << 27)
    write_sums(tmp_path)
    assert damaged_files(tmp_path) == []


def test_a_checksum_that_is_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "x.ckpt.sha256")
    (tmp_path / "x.ckpt").write_text("x")
    with pytest.raises(InputDataError, match=r"no readable x\.ckpt\.sha256"):
        check_sum(tmp_path / "x.ckpt")
