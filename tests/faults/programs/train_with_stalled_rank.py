"""Trains under Lightning's launcher, with one rank that stops in its fourth step: [SETTING...].

The environment variable STALLED_RANK is its number.
"""

import os
import time
from pathlib import Path
from typing import Any

from pytorch_lightning.strategies import DDPStrategy

import protlm.commands.train as command
from protlm.train import end_with_parent
from protlm.training.module import LanguageModeling

original_step = LanguageModeling.training_step
original_setup = DDPStrategy.setup_environment


def setup_environment(self: DDPStrategy) -> None:
    """Waits for rank 1, because the time-out applies from the start of the run."""
    if os.environ.get("LOCAL_RANK", "0") == "1":
        Path("ready").touch()
    while not Path("ready").exists():
        time.sleep(0.05)
    original_setup(self)


def stall() -> None:
    """Sleeps longer than the time-out."""
    Path("stalled").write_text(str(os.getpid()))
    time.sleep(1000)


def training_step(self: LanguageModeling, batch: Any, batch_index: int) -> Any:
    """Computes a step, unless this rank is to stop in it."""
    if batch_index == 3 and self.global_rank == int(os.environ["STALLED_RANK"]):
        stall()
    return original_step(self, batch, batch_index)


if __name__ == "__main__":
    end_with_parent()
    DDPStrategy.setup_environment = setup_environment
    LanguageModeling.training_step = training_step
    command.main()
