"""Saves the gradient of one step on several ranks and micro-batches: DTYPE [SETTING...].

`RANKS-PARTS.pt` is that of RANKS ranks and PARTS micro-batches. Ranks are forks of one process that
has imported everything and computed nothing.
"""

import os
import socket
import sys
from typing import Any

import torch

# Imported before the forks, which share it.
import protlm.commands.train as command
import protlm.model.pretrained  # noqa: F401
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.training.module import LanguageModeling

TOKENS = 2048
original_divide = LanguageModeling.on_before_optimizer_step
original_build = command.build_network


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def train_rank(dtype: str, ranks: int, parts: int, rank: int, port: str) -> None:
    """Trains as one rank of a job; the first rank saves its gradient."""
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    launched |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": "test"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in launched.items()})

    def divide_and_save(self: LanguageModeling, optimizer: Any) -> None:
        original_divide(self, optimizer)
        if rank == 0:
            gradients = [parameter.grad for parameter in self.parameters()]
            flat = [gradient.flatten() for gradient in gradients if gradient is not None]
            assert len(flat) == len(gradients)
            torch.save(torch.cat(flat), f"{ranks}-{parts}.pt")

    LanguageModeling.on_before_optimizer_step = divide_and_save
    command.build_network = lambda *given, **named: original_build(*given, **named).to(
        getattr(torch, dtype)
    )
    settings = [f"run_dir=run-{ranks}-{parts}", f"trainer.devices={ranks}"]
    settings += [f"data.tokens_per_batch={-(-TOKENS // parts)}"]
    command.train(compose(TrainConfig, [*sys.argv[2:], *settings]))


def train(dtype: str, ranks: int, parts: int) -> None:
    """Trains in a fork for each rank."""
    port, children = free_port(), []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            try:
                train_rank(dtype, ranks, parts, rank, port)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * ranks


if __name__ == "__main__":
    for ranks, parts in ((1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (2, 2)):
        train(sys.argv[1], ranks, parts)
