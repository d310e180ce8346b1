"""Settings with which a run can be resumed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.checkpoints.format import latest
from protlm.system.errors import UserError


def test_settings_that_are_newer_than_a_run_have_their_defaults(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    run = train_tiny(tmp_path / "run", "trainer.max_steps=2")
    config = run / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    older = [line for line in lines if not line.strip().startswith("token_dropout:")]
    assert len(older) == len(lines) - 1
    config.write_text("".join(older))
    newest = latest(train_tiny(run, "trainer.max_steps=3"))
    assert newest is not None and newest.name == "step-00000003.ckpt"
    message = r"a run with model\.token_dropout=False, not True; .* protlm train run_dir="
    with pytest.raises(UserError, match=message):
        train_tiny(run, "model.token_dropout=true", "trainer.max_steps=4")
    message = (
        r"model\.dropout=0\.0, not 0\.1; model\.token_dropout=False, not True; seed=0, not 7; to"
    )
    with pytest.raises(UserError, match=message):
        train_tiny(run, "seed=7", "model.token_dropout=true", "model.dropout=0.1")
