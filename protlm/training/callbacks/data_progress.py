"""The position in the data, as it is saved with a checkpoint."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from protlm.data.batching.plan import Progress
from protlm.data.dataset import Batch
from protlm.training.datamodule import SequenceData
from protlm.training.lightning_internals import rescale_batch_counters

# The key of a checkpoint under which the micro-batches per optimizer step are saved.
_PARTS = "batches_per_step"


class TrackDataProgress(Callback):
    """Updates the position of the data module, so that checkpoints save it.

    A checkpoint also saves the number of micro-batches per step: a resumed run may have more or
    fewer.
    """

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Saves the number of micro-batches per step."""
        checkpoint[_PARTS] = trainer.accumulate_grad_batches

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Rescales Lightning's batch counters to the current number of micro-batches per step."""
        now = trainer.accumulate_grad_batches
        rescale_batch_counters(checkpoint, before=checkpoint[_PARTS], now=now)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Reads the position from the batch itself, because loaders run ahead of training."""
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        assert isinstance(data, SequenceData)
        data.progress = Progress(*batch.after)
