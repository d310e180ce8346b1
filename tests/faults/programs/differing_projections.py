"""Trains ranks whose draws differ: [SETTING...]; prints sums of buffers before and after."""

import json
from typing import Any

from torch import Tensor

from protlm.attention.ops.projection import Projection
from protlm.training.callbacks.hooks import CheckSameStep
from protlm.training.module import LanguageModeling
from tests.faults.programs.rank import RANK, train

original = Projection.draw
sums: list[list[float]] = []


def draw(self: Projection, seed: int, index: int) -> Tensor:
    """Draws a projection that is different on each rank."""
    return original(self, seed, index) + RANK


def record(self: LanguageModeling) -> None:
    """Records the sum of each buffer."""
    sums.append([float(buffer.double().sum()) for buffer in self.network.buffers()])


def setup(self: CheckSameStep, trainer: Any, pl_module: Any, stage: str) -> None:
    """Records the buffers before the ranks exchange them."""
    record(pl_module)


if __name__ == "__main__":
    Projection.draw = draw
    CheckSameStep.setup = setup
    LanguageModeling.on_train_end = record
    train("run", "attention=performer_softmax", "trainer.max_steps=3")
    print(json.dumps(sums))
