"""torch.compile of the blocks: one graph for each length of a batch, for all blocks."""

from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer

from protlm.model.block import Block
from protlm.model.transformer import ProteinLM
from protlm.training.callbacks.hooks import LoopCallback
from protlm.training.module import Objective

# Beyond this number torch runs eagerly. There are 65 lengths up to 1,024 tokens, and 16 more for
# each doubling.
_MOST_GRAPHS = 1024


def compile_blocks(network: ProteinLM, *, backend: str = "inductor") -> None:
    """Compiles the forward pass of the blocks in place; names in the state dict do not change.

    Blocks have the same code, so that one graph serves all of them. Shapes are not symbolic:
    batches have few shapes, and linear attention needs a known length to cut it into tiles. Hooks
    of a block stay outside the graph.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _MOST_GRAPHS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, _MOST_GRAPHS)
    for block in network.blocks:
        assert isinstance(block, Block)
        block.forward = torch.compile(block.forward, dynamic=False, backend=backend)


class RunEagerly(LoopCallback):
    """Runs compiled blocks eagerly where a graph does not pay off.

    This applies to validation, which would need a second graph for each shape, and to the batches
    that callbacks inspect by hooks: of one step in `every`.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._every is not None and (trainer.global_step + 1) % self._every == 0:
            torch.compiler.set_stance("force_eager")

    def on_step_end(self, trainer: Trainer, module: Objective, batch: Any) -> None:
        torch.compiler.set_stance("default")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.compiler.set_stance("force_eager")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.compiler.set_stance("default")
