"""A logger that is missing or fails: one warning, training unaffected."""

import re
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pytorch_lightning.loggers.logger import DummyLogger

from protlm.checkpoints.format import all_checkpoints


class Failing(DummyLogger):
    """Takes the first metrics and fails from the second on."""

    calls = 0

    def log_metrics(self, *inputs: Any, **named: Any) -> None:
        Failing.calls += 1
        if Failing.calls > 1:
            raise ConnectionError("no route to host")


def without_wandb(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "wandb", None)
    patch.setattr("pytorch_lightning.loggers.wandb._WANDB_AVAILABLE", False)


def failing_start(patch: pytest.MonkeyPatch) -> None:
    fail = Mock(side_effect=RuntimeError("no API key"))
    patch.setattr("protlm.training.loggers._wandb", fail)


def failing_later(patch: pytest.MonkeyPatch) -> None:
    Failing.calls = 0
    patch.setattr("protlm.training.loggers._wandb", lambda *_: Failing())


CASES = {
    "missing": (without_wandb, "wandb failed and is off"),
    "failing at the start": (failing_start, "wandb failed and is off: no API key"),
    "failing later": (failing_later, "wandb failed and is off: no route to host"),
}


@pytest.fixture(scope="module")
def plain(train_tiny, tmp_path_factory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "plain", "trainer.log_every=1")


@pytest.mark.parametrize(("spoil", "words"), CASES.values(), ids=CASES)
def test_the_training_is_unaffected(spoil, words, plain, train, state_of, log_of):
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        spoil(patch)
        run = train("run", "logger=wandb", "trainer.log_every=1")
    (found,) = [str(one.message) for one in told if "wandb" in str(one.message)]
    assert re.search(words, found), found
    assert state_of(max(all_checkpoints(run))) == state_of(max(all_checkpoints(plain)))
    assert log_of(run) == log_of(plain)
