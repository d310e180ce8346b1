"""A run that was killed after any step resumes as if uninterrupted."""

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from protlm.checkpoints.format import all_checkpoints, checkpoint_name, set_latest, step_of
from protlm.training.module import LanguageModeling

STEPS = 12
# 150 sequences in batches of 1,024 tokens are about 17 batches: with accumulation the run crosses
# the end of an epoch. The steps of logs, validations, redraws and the end of the epoch differ.
HARD = (
    "attention=performer_softmax",
    "attention.num_features=32",
    "attention.redraw_every=3",
    # With them 32 features do for an estimate, and the run does not warn.
    "model.qk_norm=true",
    "model.dropout=0.3",
    "data.crop=random",
    "trainer.accumulate_grad_batches=2",
    "trainer.activation_checkpointing=true",
    "trainer.ema_decay=0.9",
    "trainer.valid_every=4",
    "trainer.log_every=5",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=100",
    "schedule=cosine",
    "schedule.warmup_steps=2",
    f"trainer.max_steps={STEPS}",
)

Train = Callable[..., Path]
Read = Callable[[Path], Any]


@pytest.fixture(scope="module")
def uninterrupted(train_tiny: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "whole", *HARD)


@pytest.fixture
def go_back(uninterrupted: Path, tmp_path: Path) -> Callable[[int], Path]:
    """Copies the uninterrupted run as a process killed after a step would have left it."""

    def copy(step: int) -> Path:
        run = shutil.copytree(uninterrupted, tmp_path / f"from-{step}")
        for path in all_checkpoints(run):
            if step_of(path) > step:
                path.unlink()
        set_latest(run / "checkpoints" / checkpoint_name(step))
        return run

    return copy


def assert_same(run: Path, whole: Path, state_of: Read, log_of: Read) -> None:
    """Compares the log, and all contents of all checkpoints."""
    names = [path.name for path in all_checkpoints(whole)]
    assert [path.name for path in all_checkpoints(run)] == names
    for name in names:
        found, expected = (state_of(where / "checkpoints" / name) for where in (run, whole))
        assert found.keys() == expected.keys()
        assert [key for key in expected if found[key] != expected[key]] == [], name
    assert log_of(run) == log_of(whole)


def test_killed_after_every_step(
    uninterrupted: Path,
    train_tiny: Train,
    killed_after: Callable,
    tmp_path: Path,
    state_of: Read,
    log_of: Read,
) -> None:
    """One run that is killed after each of its steps: each start makes one step and is compared.

    As step k + 1 is exact when begun from the checkpoint of step k, and that checkpoint is exact,
    a run continued from any step is exact to its end.
    """
    run = tmp_path / "run"
    for step in range(1, STEPS + 1):
        with killed_after(step):
            train_tiny(run, *HARD)
    train_tiny(run, *HARD)
    assert_same(run, uninterrupted, state_of, log_of)


def test_the_run_covers_the_difficult_cases(
    uninterrupted: Path, log_of: Read, state_of: Read
) -> None:
    rows = log_of(uninterrupted)
    assert [row["step"] for row in rows if "train_loss" in row] == [5, 10]
    assert [row["step"] for row in rows if "valid_loss" in row] == [4, 8, 12]
    assert {row.get("epoch", 0) for row in rows} == {0, 1}
    states = [state_of(path) for path in all_checkpoints(uninterrupted)]
    projections = [
        {name: state[name] for name in state if "projection" in name} for state in states
    ]
    changed = [a != b for a, b in pairwise(projections)]
    assert changed == [step % 3 == 0 for step in range(1, STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 7, 9])
def test_several_steps_after_the_kill(
    step: int,
    go_back: Callable[[int], Path],
    uninterrupted: Path,
    train_tiny: Train,
    state_of: Read,
    log_of: Read,
) -> None:
    run = train_tiny(go_back(step), *HARD)
    assert_same(run, uninterrupted, state_of, log_of)


@pytest.mark.parametrize(
    ("step", "every"),
    [
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(8, 3, marks=pytest.mark.slow),
        (STEPS, 1),
        pytest.param(STEPS, 5, marks=pytest.mark.slow),
    ],
)
def test_killed_during_a_validation(
    step: int,
    every: int,
    train_tiny: Train,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state_of: Read,
    log_of: Read,
) -> None:
    """No row is repeated or missing, wherever the run resumes, also at the last step."""
    validate = LanguageModeling.validation_step
    settings = [*HARD, f"trainer.checkpoint_every={every}"]

    def validate_or_die(self: LanguageModeling, batch: Any, batch_index: int) -> None:
        if self.trainer.global_step == step and batch_index == 1:
            raise SystemError("killed")
        validate(self, batch, batch_index)

    with monkeypatch.context() as patch, pytest.raises(SystemError):
        patch.setattr(LanguageModeling, "validation_step", validate_or_die)
        train_tiny(tmp_path / "run", *settings)
    run = train_tiny(tmp_path / "run", *settings)
    assert log_of(run) == log_of(uninterrupted)
    for path in all_checkpoints(run):
        assert state_of(path) == state_of(uninterrupted / "checkpoints" / path.name), path.name
    assert (run / "loss.png").is_file()


def test_stopped_again_in_the_repeated_validation(
    train_tiny: Train,
    killed_after: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log_of: Read,
) -> None:
    """No step was made, so the checkpoint from which the run resumed is not written again."""
    settings = ("trainer.valid_every=2", "trainer.checkpoint_every=2", "data.tokens_per_batch=512")
    run = tmp_path / "run"
    with killed_after(2):
        train_tiny(run, *settings)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.ckpt*")}

    def stop(self: LanguageModeling, batch: Any, batch_index: int) -> None:
        self.trainer.should_stop = True

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(LanguageModeling, "validation_step", stop)
        train_tiny(run, *settings)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.ckpt*")} == before
    train_tiny(run, *settings)
    assert [row["step"] for row in log_of(run) if "valid_loss" in row] == [2, 4]


def test_a_complete_run_is_left_unchanged(uninterrupted: Path, train_tiny: Train) -> None:
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*.ckpt*")}
    train_tiny(uninterrupted, *HARD)
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*.ckpt*")} == before


@pytest.mark.slow
def test_with_other_numbers_of_workers(
    train_tiny: Train,
    killed_after: Callable,
    uninterrupted: Path,
    tmp_path: Path,
    state_of: Read,
    log_of: Read,
) -> None:
    """Workers run ahead of the training: the batches they have prepared are not skipped."""
    run = tmp_path / "run"
    with killed_after(5):
        train_tiny(run, *HARD, "data.num_workers=2")
    train_tiny(run, *HARD, "data.num_workers=1")
    assert_same(run, uninterrupted, state_of, log_of)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("optimizer=muon", "objective=causal", "data=concatenated", "data.num_workers=0"),
        ("trainer.accumulate_grad_batches=1", "trainer.tokens_per_step=2048", "attention=rfa"),
    ],
)
def test_other_ways_to_train(
    settings: tuple[str, ...],
    train_tiny: Train,
    killed_after: Callable,
    tmp_path: Path,
    state_of: Read,
    log_of: Read,
) -> None:
    given = {setting.partition("=")[0] for setting in settings}
    kept = [s for s in HARD if s.partition("=")[0] not in given and not s.startswith("attention")]
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_tiny(whole, *kept, *settings)
    for step in (1, 2, 5, 6):
        with killed_after(step):
            train_tiny(run, *kept, *settings)
    train_tiny(run, *kept, *settings)
    assert_same(run, whole, state_of, log_of)


@pytest.mark.slow
def test_sampling_by_cluster(
    train_tiny: Train,
    killed_after: Callable,
    tiny_clusters: Path,
    tmp_path: Path,
    state_of: Read,
    log_of: Read,
) -> None:
    """Across the ends of epochs, with masks, crops and dropout."""
    settings = (*HARD, "data.sampling=cluster", f"data.dir={tiny_clusters}")
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_tiny(whole, *settings)
    assert max(row.get("epoch", 0) for row in log_of(whole)) >= 2
    for step in (3, 4, 8):
        with killed_after(step):
            train_tiny(run, *settings)
    train_tiny(run, *settings)
    assert_same(run, whole, state_of, log_of)
