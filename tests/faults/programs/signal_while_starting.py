"""Sends SIGTERM to rank 1 while its loaders start: [SETTING...]; prints how the run ended."""

import json
import os
import signal
from typing import Any

from protlm.training.datamodule import SequenceData
from tests.faults.programs.rank import RANK, train

original = SequenceData.train_dataloader


def train_dataloader(self: SequenceData) -> Any:
    """Sends the signal, then makes the loader."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(self)


if __name__ == "__main__":
    SequenceData.train_dataloader = train_dataloader
    print(json.dumps(train("run", "trainer.max_steps=9", "trainer.timeout_minutes=0.5")))
