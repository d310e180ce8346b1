"""torch.compile of the blocks: one graph for each length of a batch, for all blocks."""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import nn

from protlm.data.dataset import Batch
from protlm.model.block import Block
from protlm.model.transformer import ProteinLM

# Beyond this torch gives up and runs eagerly; there are 65 lengths up to 1,024 tokens, and 16 more
# for each doubling.
_MOST_GRAPHS = 1024


def compile_blocks(network: ProteinLM, *, backend: str = "inductor") -> None:
    """Compiles the forward pass of the blocks, in place: names in a state dict stay as they are.

    Blocks have the same code, so that a graph that was made for one serves all. Shapes are not
    symbolic: batches have few, and linear attention cuts a length that is known into tiles. Hooks
    of a block, as FSDP's, stay outside.

    Args:
        network: whose blocks are compiled when they first see a shape.
        backend: what compiles.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _MOST_GRAPHS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, _MOST_GRAPHS)
    for block in network.blocks:
        assert isinstance(block, Block)
        # Reversible blocks hand functions over to autograd, which no graph can hold.
        parts: list[nn.Module] = [block.attention, block.feedforward]
        for part in parts if network.reversible else [block]:
            part.forward = torch.compile(part.forward, dynamic=False, backend=backend)


class RunEagerly(Callback):
    """Runs compiled blocks as they are written where a graph is not worth making.

    That is in validation, which would take a second graph of each shape, and in the batches that
    callbacks look into by hooks.

    Args:
        every: optimiser steps between two batches that are looked into, or None.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Looks whether the step after this batch is logged."""
        if self._every is not None and (trainer.global_step + 1) % self._every == 0:
            torch.compiler.set_stance("force_eager")

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Goes back to graphs."""
        torch.compiler.set_stance("default")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves the graphs aside."""
        torch.compiler.set_stance("force_eager")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Goes back to graphs."""
        torch.compiler.set_stance("default")
