"""A run that is requeued five times has one log, without gaps or repeated rows."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protlm.checkpoints.format import checkpoint_name
from protlm.system.errors import ExitCode
from protlm.training.module import LanguageModeling

STEPS = 14
SETTINGS = (
    "attention=performer_softmax",
    "attention.num_features=32",
    "attention.redraw_every=3",
    "model.qk_norm=true",
    "model.dropout=0.1",
    "trainer.valid_every=4",
    "trainer.log_every=3",
    "trainer.checkpoint_every=100",
    f"trainer.max_steps={STEPS}",
)


@pytest.mark.slow
def test_requeued_five_times(
    train_tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state_of: Callable[[Path], Any],
    log_of: Callable[[Path], Any],
) -> None:
    whole, run = train_tiny(tmp_path / "whole", *SETTINGS), tmp_path / "run"
    work = LanguageModeling.training_step
    # In the first step, where a validation is due, after a row of the log, and twice in a row.
    due = {1, 4, 6, 7, 11}

    def training_step(self: LanguageModeling, batch: Any, index: int) -> Any:
        if self.trainer.global_step + 1 in due:
            os.kill(os.getpid(), signal.SIGUSR1)
        return work(self, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModeling, "training_step", training_step)
        for _ in range(len(due)):
            with pytest.raises(SystemExit) as ended:
                train_tiny(run, *SETTINGS)
            assert ended.value.code == ExitCode.PREEMPTED
    train_tiny(run, *SETTINGS)
    rows = log_of(run)
    assert rows == log_of(whole)
    assert [row["step"] for row in rows if "train_loss" in row] == [3, 6, 9, 12]
    assert [row["step"] for row in rows if "valid_loss" in row] == [4, 8, 12, 14]
    last = Path("checkpoints") / checkpoint_name(STEPS)
    found, expected = state_of(run / last), state_of(whole / last)
    assert [key for key in expected if found[key] != expected[key]] == []
