"""The redrawing of random projections during training."""

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from torch import nn

from protlm.attention.base import RandomFeatures
from protlm.data.dataset import Batch


class RedrawFeatures(Callback):
    """Redraws random projections as a pure function of the optimizer step, outside `forward`.

    The last bits of LAPACK's results differ between processors, so all ranks use rank 0's draw.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copies rank 0's first draw and tables to all ranks."""
        for module in pl_module.modules():
            _copy_from_rank_0(trainer, module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Redraws the projections that are due."""
        for module in pl_module.modules():
            if not isinstance(module, RandomFeatures) or module.redraw_every is None:
                continue
            index, rest = divmod(trainer.global_step, module.redraw_every)
            if rest == 0:
                module.redraw(index)
                _copy_from_rank_0(trainer, module)


def _copy_from_rank_0(trainer: pl.Trainer, module: nn.Module) -> None:
    for buffer in module.buffers(recurse=False):
        buffer.copy_(trainer.strategy.broadcast(buffer))
