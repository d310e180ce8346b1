"""What a run may be continued with."""

from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.errors import UserError
from protlm.model.checkpoint import latest


def test_settings_that_are_newer_than_a_run_have_their_defaults(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    run = train_tiny(tmp_path / "run", "trainer.max_steps=2")
    config = run / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    older = [line for line in lines if not line.strip().startswith("reversible:")]
    assert len(older) == len(lines) - 1
    config.write_text("".join(older))
    newest = latest(train_tiny(run, "trainer.max_steps=3"))
    assert newest is not None and newest.name == "step-00000003.ckpt"
    told = r"model\.reversible=False, not True; continue it with model\.reversible=False,"
    with pytest.raises(UserError, match=told):
        train_tiny(run, "model.reversible=true", "trainer.max_steps=4")
    told = r"model\.dropout=0\.0, not 0\.1, and 2 more settings differ; .* in .*config\.yaml"
    with pytest.raises(UserError, match=told):
        train_tiny(run, "seed=7", "model.reversible=true", "model.dropout=0.1")
