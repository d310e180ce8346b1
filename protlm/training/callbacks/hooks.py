"""Small hooks into the loop: what every run needs, one class for each."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer

from protlm.attention.base import RandomFeatures
from protlm.data.batching.plan import Progress
from protlm.system.errors import UserError
from protlm.training.datamodule import SequenceData
from protlm.training.lightning_internals import (
    rescale_batch_counters,
    set_last_step,
    validate_after_this_batch,
    validate_now,
)
from protlm.training.module import Objective

# The key of a checkpoint under which the micro-batches per optimizer step are saved.
_PARTS = "batches_per_step"


class LoopCallback(Callback):
    """A callback with hooks after optimizer steps, each of one or more micro-batches.

    Attributes:
        columns: the names of the values that it logs, beside those of every run.
    """

    columns: Sequence[str] = ()

    def on_step_end(self, trainer: Trainer, module: Objective, batch: Any) -> None:
        """Acts after the last micro-batch of a step."""

    def on_validated_batch(self, trainer: Trainer, number: int) -> None:
        """Acts after a batch of a validation; the first one has the number 1."""

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            assert isinstance(pl_module, Objective)
            self.on_step_end(trainer, pl_module, batch)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.on_validated_batch(trainer, batch_idx + 1)


class CheckSameStep(Callback):
    """Rejects ranks that resume from different steps; each chooses its checkpoint itself."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        steps = [trainer.global_step] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(steps, trainer.global_step)
        other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
        if other is not None:
            raise UserError(
                f"rank 0 resumes from step {steps[0]}, rank {other} from step {steps[other]}: "
                f"run_dir={trainer.default_root_dir} is not the same directory for both; type a "
                "run_dir= on a file system that all nodes see"
            )


class TrackDataProgress(LoopCallback):
    """Updates the position of the data module, so that checkpoints save it.

    A checkpoint also saves the number of micro-batches per step: a resumed run may have more or
    fewer, and Lightning's counters of batches are rescaled.
    """

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[_PARTS] = trainer.accumulate_grad_batches

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        now = trainer.accumulate_grad_batches
        rescale_batch_counters(checkpoint, before=checkpoint[_PARTS], now=now)

    def on_step_end(self, trainer: Trainer, module: Objective, batch: Any) -> None:
        """Reads the position from the batch itself, because loaders run ahead of training."""
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        assert isinstance(data, SequenceData)
        data.progress = Progress(*batch.after)


class RedrawFeatures(Callback):
    """Redraws random projections as a pure function of the optimizer step, outside `forward`.

    The last bits of LAPACK's results differ between processors, so all ranks use the draws and
    tables of rank 0.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in pl_module.modules():
            for buffer in module.buffers(recurse=False):
                buffer.copy_(trainer.strategy.broadcast(buffer))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for module in pl_module.modules():
            if not isinstance(module, RandomFeatures) or module.redraw_every is None:
                continue
            index, rest = divmod(trainer.global_step, module.redraw_every)
            if rest == 0:
                module.redraw(index)
                for buffer in module.buffers(recurse=False):
                    buffer.copy_(trainer.strategy.broadcast(buffer))


class ValidateLastStep(LoopCallback):
    """Validates the last weights of a run whose length is not a multiple of the interval."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps

    def on_step_end(self, trainer: Trainer, module: Objective, batch: Any) -> None:
        if trainer.global_step >= self._max_steps:
            validate_after_this_batch(trainer)


class ResumeValidation(Callback):
    """Validates the step that a run starts from, where this is due or was interrupted."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Allows Lightning to start a run that has made its last step."""
        set_last_step(trainer, self._max_steps + 1)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validates, as Lightning does between two steps."""
        validate_now(trainer)
        set_last_step(trainer, self._max_steps)
