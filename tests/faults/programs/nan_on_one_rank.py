"""Makes the loss of one batch of rank 1 NaN: [SETTING...]; rank 1 prints the batch's samples."""

import json
import math
from typing import Any

from protlm.training.module import LanguageModeling
from tests.faults.programs.rank import RANK, train

SETTINGS = ("trainer.checkpoint_every=1", "trainer.keep_checkpoints=9", "trainer.log_every=1")
original = LanguageModeling.training_step


def training_step(self: LanguageModeling, batch: Any, batch_index: int) -> Any:
    """Computes a step, the third on rank 1 with a bias that is NaN."""
    if batch_index != 2 or RANK != 1:
        return original(self, batch, batch_index)
    bias = self.network.head.bias
    kept = bias.data.clone()
    bias.data.fill_(math.nan)
    out = original(self, batch, batch_index)
    bias.data.copy_(kept)
    print(json.dumps([n for n in batch.samples_B.tolist() if n >= 0]), flush=True)
    return out


if __name__ == "__main__":
    LanguageModeling.training_step = training_step
    assert train("run", *SETTINGS, "trainer.max_steps=5") == (5, 0)
