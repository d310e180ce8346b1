"""Saves the gradients of one step on several ranks and micro-batches: a table of runs in JSON.

A run has a name, the numbers of its ranks and of its micro-batches, and settings; its gradient is
in `NAME.pt`. Ranks are forks of one process that has imported everything and computed nothing.
"""

import json
import os
import sys
import traceback
from typing import Any

import torch

# Imported before the forks, which share it.
import protlm.commands.train as command
import protlm.model.pretrained  # noqa: F401
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.training.module import LanguageModeling
from tests.fixtures.ranks import free_port

TOKENS = 2048
original_divide = LanguageModeling.on_before_optimizer_step


def train_rank(name: str, ranks: int, parts: int, rank: int, port: str, given: list[str]) -> None:
    """Trains as one rank of a job, in float64; the first rank saves its gradient."""
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    launched |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": "test"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in launched.items()})

    def divide_and_save(self: LanguageModeling, optimizer: Any) -> None:
        original_divide(self, optimizer)
        if rank == 0:
            parameters = [p for p in self.parameters() if p.requires_grad]
            gradients = [p.grad.flatten() for p in parameters if p.grad is not None]
            assert len(gradients) == len(parameters) and gradients[0].dtype is torch.float64
            torch.save(torch.cat(gradients), f"{name}.pt")

    LanguageModeling.on_before_optimizer_step = divide_and_save
    torch.set_default_dtype(torch.float64)
    settings = [f"run_dir=run-{name}", f"trainer.devices={ranks}"]
    settings += [f"trainer.tokens_per_step={TOKENS}", f"data.tokens_per_batch={TOKENS // parts}"]
    command.train(compose(TrainConfig, [*given, *settings]))


def train(name: str, ranks: int, parts: int, settings: list[str]) -> None:
    """Trains in a fork for each rank."""
    port, children = str(free_port()), []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            try:
                train_rank(name, ranks, parts, rank, port, settings)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * ranks


if __name__ == "__main__":
    for run in json.loads(sys.argv[1]):
        train(*run)
