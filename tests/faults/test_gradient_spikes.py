"""A gradient that is not finite, or far larger than those before: the step is skipped."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.system.errors import TrainingDivergedError, UserError
from protlm.training.callbacks import skipped_steps as bad_numbers
from protlm.training.callbacks.skipped_steps import BAD_BATCHES
from protlm.training.module import LanguageModeling

Train = Callable[..., Path]
Read = Callable[[Path], Any]
# The weights, what the optimiser knows of them, the schedule and the average: what a step changes.
LEARNED = ("state_dict.", "optimizer_states.", "lr_schedulers.", "average.")
SETTINGS = (
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=100",
    "trainer.ema_decay=0.9",
)


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Multiplies the loss of the batches of these numbers, counted from the first of the run."""

    def patch(*numbers: int, factor: float = math.nan) -> None:
        work = LanguageModeling.training_step

        def training_step(self: LanguageModeling, batch: Any, index: int) -> Any:
            out = work(self, batch, index)
            if index in numbers:
                return out | {"loss": out["loss"] * factor}
            return out

        monkeypatch.setattr(LanguageModeling, "training_step", training_step)

    return patch


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / BAD_BATCHES).read_text().splitlines()]


def learned(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key.startswith(LEARNED)}


def test_a_step_with_an_infinite_gradient_is_skipped(
    spoil: Callable, train_tiny: Train, tmp_path: Path, state_of: Read
) -> None:
    """The loss is finite, so all samples of the step are listed."""
    spoil(1, factor=1e38)
    with pytest.warns(UserWarning, match="step 2 was skipped: the gradient is not finite"):
        run = train_tiny(tmp_path / "run", *SETTINGS)
    (line,) = lines(run)
    assert line["gradient_norm"] is None and len(line["accessions"]) >= 8
    states = [state_of(run / "checkpoints" / f"step-{n:08d}.ckpt") for n in (1, 2)]
    assert learned(states[0]) == learned(states[1])


def test_a_spike_is_skipped_and_its_window_is_in_the_checkpoint(
    spoil: Callable,
    train_tiny: Train,
    tmp_path: Path,
    state_of: Read,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bad_numbers, "WINDOW", 4)
    # Before there are four norms a spike is not known for one.
    spoil(1, 6, factor=1000.0)
    settings = (*SETTINGS, "trainer.max_gradient_norm_ratio=5", "trainer.max_steps=8")
    with pytest.warns(UserWarning, match="step 7 was skipped: the gradient norm is .* is usual"):
        whole = train_tiny(tmp_path / "whole", *settings)
    assert [line["step"] for line in lines(whole)] == [7]
    states = [state_of(whole / "checkpoints" / f"step-{n:08d}.ckpt") for n in (6, 7, 8)]
    assert learned(states[0]) == learned(states[1]) != learned(states[2])
    run = tmp_path / "run"
    train_tiny(run, *settings, "trainer.max_steps=6")
    with pytest.warns(UserWarning, match="step 7 was skipped"):
        train_tiny(run, *settings)
    name = "step-00000008.ckpt"
    assert learned(state_of(run / "checkpoints" / name)) == learned(
        state_of(whole / "checkpoints" / name)
    )


def test_spikes_that_do_not_end_name_the_limit(
    spoil: Callable, train_tiny: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_numbers, "WINDOW", 2)
    spoil(3, 4, factor=1000.0)
    limits = ("trainer.max_gradient_norm_ratio=5", "trainer.max_bad_steps=2")
    with (
        pytest.warns(UserWarning, match="was skipped"),
        pytest.raises(TrainingDivergedError, match=r"larger trainer\.max_gradient_norm_ratio"),
    ):
        train_tiny(tmp_path / "run", *SETTINGS, *limits, "trainer.max_steps=8")


@pytest.mark.slow
def test_without_a_limit_a_spike_is_an_ordinary_step(
    spoil: Callable, train_tiny: Train, tmp_path: Path
) -> None:
    spoil(3, factor=1000.0)
    run = train_tiny(tmp_path / "run", "trainer.max_steps=5")
    assert not (run / BAD_BATCHES).exists()


def test_impossible_settings_are_refused() -> None:
    for setting in ("trainer.max_bad_steps=0", "trainer.max_gradient_norm_ratio=0.5"):
        with pytest.raises(UserError, match=setting):
            compose(TrainConfig, [setting])
