"""A failure to write a checkpoint leaves the others intact, and ends a run only on request."""

import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import protlm
from protlm.checkpoints import format as checkpoints
from protlm.checkpoints.format import all_checkpoints, latest, step_of
from protlm.system.errors import ExitCode, OutputError
from protlm.system.lock import LOCK
from protlm.training.callbacks.save_checkpoints import SaveCheckpoints

Train = Callable[..., Path]
Read = Callable[[Path], Any]
SETTINGS = ("trainer.checkpoint_every=1", "trainer.keep_checkpoints=4", "trainer.valid_every=9")


@pytest.fixture(scope="module")
def whole(train_tiny: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "whole", *SETTINGS)


def steps_of(run: Path) -> list[int]:
    return [step_of(path) for path in all_checkpoints(run)]


def full_from(step: int, patch: pytest.MonkeyPatch, *, until: int = 1_000) -> None:
    """Simulates a full disk for checkpoints from a step on."""
    save = torch.save

    def save_a_part(contents: dict[str, Any], file: Any) -> None:
        if not step <= contents["global_step"] < until:
            return save(contents, file)
        file.write(b"a part of it")
        raise OSError(28, "No space left on device")

    patch.setattr(checkpoints.torch, "save", save_a_part)


def test_a_small_disk_keeps_what_fits(
    whole: Path, train_tiny: Train, tmp_path: Path, small_disk: Callable, state_of: Read
) -> None:
    """On a disk with space for two and a half checkpoints, simulated if none can be mounted."""
    room = int(2.5 * all_checkpoints(whole)[0].stat().st_size)
    patch = pytest.MonkeyPatch()
    with small_disk(tmp_path / "disk", str(room)) as is_mounted, patch.context() as full:
        run = tmp_path / "disk" / "run"
        if not is_mounted:
            full_from(3, full)
        with (
            pytest.warns(UserWarning, match=r"no space left.*training continues") as warned,
            pytest.raises(OutputError, match="last checkpoint is step 2") as ended,
        ):
            train_tiny(run, *SETTINGS)
        assert ended.value.exit_code == ExitCode.OUTPUT
        assert len(warned) == 1
        assert steps_of(run) == [1, 2]
        assert not list(run.rglob(".*"))
        assert protlm.load(run).hash
        full.undo()
        if is_mounted:
            remount = ["mount", "-o", "remount,size=64m", run.parent]
            subprocess.run(remount, check=True)
        train_tiny(run, *SETTINGS)
        for path in all_checkpoints(whole):
            assert state_of(run / "checkpoints" / path.name) == state_of(path)


def test_training_continues_without_one_checkpoint(
    whole: Path,
    train_tiny: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state_of: Read,
    log_of: Read,
) -> None:
    full_from(2, monkeypatch, until=4)
    with pytest.warns(UserWarning) as warned:
        run = train_tiny(tmp_path / "run", *SETTINGS)
    assert [f"step-0000000{step}" in str(w.message) for step, w in enumerate(warned, 2)] == [
        True,
        True,
    ]
    assert steps_of(run) == [1, 4]
    assert state_of(all_checkpoints(run)[-1]) == state_of(all_checkpoints(whole)[-1])
    assert log_of(run) == log_of(whole)


def test_the_run_ends_at_the_first_failure_on_request(
    train_tiny: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_from(2, monkeypatch)
    with pytest.raises(OutputError, match=r"no space left.*last checkpoint is step 1") as ended:
        train_tiny(tmp_path / "run", *SETTINGS, "trainer.on_save_error=stop")
    assert ended.value.exit_code == ExitCode.OUTPUT
    assert steps_of(tmp_path / "run") == [1]


def test_a_disk_that_becomes_read_only(
    whole: Path,
    train_tiny: Train,
    tmp_path: Path,
    small_disk: Callable,
    monkeypatch: pytest.MonkeyPatch,
    state_of: Read,
) -> None:
    """Permission is lost during the run: the log warns once, checkpoints warn each time."""
    save = SaveCheckpoints._save
    with small_disk(tmp_path / "disk", "64m") as is_mounted:
        run = tmp_path / "disk" / "run"

        def remount(how: str) -> None:
            subprocess.run(["mount", "-o", f"remount,{how}", run.parent], check=True)

        def save_later(self: SaveCheckpoints, trainer: Any) -> None:
            if trainer.global_step == 2 and is_mounted:
                remount("ro")
            save(self, trainer)

        with monkeypatch.context() as patch:
            patch.setattr(SaveCheckpoints, "_save", save_later)
            if not is_mounted:
                full_from(2, patch)
            with warnings.catch_warnings(record=True), pytest.raises(OutputError, match="step 1"):
                warnings.simplefilter("always")
                train_tiny(run, *SETTINGS)
        assert steps_of(run) == [1]
        if is_mounted:
            remount("rw")
            # A process that has ended needs no such help: its lock is taken over.
            (run / LOCK).unlink()
        train_tiny(run, *SETTINGS)
        assert state_of(all_checkpoints(run)[-1]) == state_of(all_checkpoints(whole)[-1])


def test_the_temporary_folder_does_not_matter(
    train_tiny: Train, tmp_path: Path, small_disk: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", "4k") as is_mounted:
        full = tmp_path / "disk" if is_mounted else tmp_path / "nowhere"
        monkeypatch.setenv("TMPDIR", str(full))
        monkeypatch.setattr(tempfile, "tempdir", str(full))
        run = train_tiny(tmp_path / "run", "trainer.max_steps=2")
    assert latest(run) is not None
