"""What happens at the start and between the steps: place in the data, redraw, validation."""

from typing import Any

import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback
from torch import nn

from protlm.attention.base import RandomFeatures
from protlm.data.batching import Progress
from protlm.data.dataset import Batch
from protlm.errors import UserError
from protlm.training.datamodule import SequenceData

# Under which a checkpoint has the batches, or parts of a batch, of an optimiser step.
_PARTS = "batches_per_step"


class AgreeOnStart(Callback):
    """Refuses ranks that go on from different steps: each has chosen a checkpoint by itself."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares the steps.

        Raises:
            UserError: the ranks do not see the same checkpoints.
        """
        steps = [trainer.global_step] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(steps, trainer.global_step)
        other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
        if other is not None:
            raise UserError(
                f"rank 0 goes on from step {steps[0]}, rank {other} from step {steps[other]}: "
                f"run_dir={trainer.default_root_dir} is not the same directory for both; type a "
                "run_dir= on a file system that all nodes see"
            )


class TrackProgress(Callback):
    """Tells the data module which samples were trained on, so that a checkpoint knows.

    A checkpoint also knows in how many parts a step was computed: a continued run may have more
    or fewer.
    """

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Writes the number of parts."""
        checkpoint[_PARTS] = trainer.accumulate_grad_batches

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Gives Lightning, which counts parts, the count it would have with those of now."""
        counts = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for count in (counts["total"], counts["current"]):
            steps = count["ready"] // checkpoint[_PARTS]
            moved = steps * trainer.accumulate_grad_batches - count["ready"]
            for stage in count:
                count[stage] += moved

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Takes the place in the data from the batch itself: loaders run ahead of it."""
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        assert isinstance(data, SequenceData)
        data.progress = Progress(*batch.after)


class RedrawFeatures(Callback):
    """Redraws random projections as a pure function of the optimiser step, outside `forward`.

    LAPACK's last bits differ between processors, so all ranks take rank 0's draw.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes rank 0's first draw everywhere, and its tables."""
        for module in pl_module.modules():
            _take_that_of_rank_0(trainer, module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Redraws where it is due."""
        for module in pl_module.modules():
            if not isinstance(module, RandomFeatures) or module.redraw_every is None:
                continue
            index, rest = divmod(trainer.global_step, module.redraw_every)
            if rest == 0:
                module.redraw(index)
                _take_that_of_rank_0(trainer, module)


def _take_that_of_rank_0(trainer: pl.Trainer, module: nn.Module) -> None:
    for buffer in module.buffers(recurse=False):
        buffer.copy_(trainer.strategy.broadcast(buffer))


class FinishValidation(Callback):
    """Does the validation of the step that a run goes on from, where it was cut off.

    Args:
        max_steps: of the run.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets Lightning start a run that has made its last step."""
        trainer.fit_loop.epoch_loop.max_steps = self._max_steps + 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validates as Lightning does between two steps."""
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
        trainer.fit_loop.epoch_loop.max_steps = self._max_steps
