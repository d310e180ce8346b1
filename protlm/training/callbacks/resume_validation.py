"""Validations outside the interval: of the last step, and of the step that a run resumes from."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from protlm.data.dataset import Batch
from protlm.training.lightning_internals import (
    set_last_step,
    validate_after_this_batch,
    validate_now,
)


class ValidateLastStep(Callback):
    """Validates the last weights of a run whose length is not a multiple of the interval.

    Args:
        max_steps: the last step of the run.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Requests a validation after the last micro-batch of the last step."""
        is_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if is_step and trainer.global_step >= self._max_steps:
            validate_after_this_batch(trainer)


class ResumeValidation(Callback):
    """Repeats the validation of the step that a run resumes from, where it was interrupted.

    Args:
        max_steps: the last step of the run.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Allows Lightning to start a run that has made its last step."""
        set_last_step(trainer, self._max_steps + 1)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validates, as Lightning does between two steps."""
        validate_now(trainer)
        set_last_step(trainer, self._max_steps)
