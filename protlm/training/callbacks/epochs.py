"""The epochs of a fine-tuning: their lines, and their end after those without a lower loss."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

from protlm.checkpoints.metrics import METRICS, read_metrics
from protlm.errors import TrainingDivergedError
from protlm.terminal import JobProgress
from protlm.training.labeled_batches import LabeledData, TokenRows
from protlm.training.labels import FinetuneSettings, LabelLearning


def valid_losses(folder: Path, *, until: int) -> list[float]:
    """Returns the validation losses of the start and of the epochs, until a step."""
    rows = read_metrics(folder / METRICS)
    return [row["valid_loss"] for row in rows if row["step"] <= until]


def stale_epochs(losses: Sequence[float]) -> int:
    """Returns the number of epochs since the one with the lowest loss.

    >>> stale_epochs([3.0, 1.0, 2.0, 1.0])
    2
    """
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


class ReportEpochs(Callback):
    """Validates, logs and prints the start and each epoch, and ends the run by its patience.

    Args:
        folder: the folder of the run.
        data: the batches.
        settings: the number of epochs, and the patience.
    """

    def __init__(self, folder: Path, data: LabeledData, settings: FinetuneSettings) -> None:
        self._folder, self._settings = folder, settings
        self._steps, self._validation = data.steps_per_epoch, data.batches_per_validation
        self._progress: JobProgress | None = None
        self._done = 0
        self._losses: list[float] = []
        # The total training loss of this epoch, and its labels.
        self._sums = torch.zeros(2, dtype=torch.float64)
        self._trainer: pl.Trainer | None = None
        self._advice = f"remove {folder} and type a smaller --learning-rate"

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums of this epoch, of all ranks."""
        return {"sums": self._total()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the sums."""
        self._sums = torch.tensor(state_dict["sums"], dtype=torch.float64)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds the place in the epochs."""
        self._trainer, step = trainer, trainer.global_step
        self._sums = self._sums.to(pl_module.device) * trainer.is_global_zero
        self._losses = valid_losses(self._folder, until=step)
        self._refuse_divergence()
        epoch, rest = divmod(step, self._steps)
        self._done = epoch * self._steps + rest + len(self._losses) * self._validation

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: TokenRows, batch_idx: int
    ) -> None:
        """Restarts the sums with each epoch."""
        if trainer.global_step % self._steps == 0:
            self._sums.zero_()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: TokenRows,
        batch_idx: int,
    ) -> None:
        """Counts a batch."""
        assert isinstance(pl_module, LabelLearning)
        if pl_module.is_skipped:
            raise TrainingDivergedError(
                f"the loss of step {trainer.global_step}, or its gradient, is not finite; "
                f"{self._advice}"
            )
        self._sums += outputs["sums"][[0, 2]]
        self._count(trainer)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: TokenRows,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Counts a batch."""
        self._count(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs and prints an epoch, and stops after too many without a lower validation loss."""
        if trainer.should_stop:
            # A signal cut it off; the resumed run repeats it.
            return
        assert isinstance(pl_module, LabelLearning)
        valid, score = pl_module.valid_scores()
        epoch, metric = trainer.global_step // self._steps, pl_module.metric.name
        total, count = self._total()
        row = {"epoch": epoch, "valid_loss": valid, f"valid_{metric}": score}
        training = "before training: "
        if epoch:
            row["train_loss"] = total / count
            training = f"training loss {total / count:.4f}, "
        for logger in trainer.loggers:
            logger.log_metrics(row, trainer.global_step)
        is_lowest = epoch > 0 and valid < min(self._losses)
        self._losses.append(valid)
        self._refuse_divergence()
        assert self._progress is not None
        number = f"epoch {epoch} of {self._settings.epochs} at most: " if epoch else "epoch 0, "
        kept = ", the lowest so far" if is_lowest else ""
        self._progress.print(
            f"{number}{training}validation {metric} {score:.3f}, loss {valid:.4f}{kept}"
        )
        trainer.should_stop = stale_epochs(self._losses) >= self._settings.patience

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the progress report."""
        is_validated = (len(self._losses) - 1) * self._steps == trainer.global_step > 0
        if self._progress is not None and is_validated and min(self._losses) == self._losses[0]:
            self._progress.print(
                "no epoch has a lower validation loss than the start, which is the result: the "
                "model is unchanged; a smaller --learning-rate may be better"
            )
        self._end()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Removes the progress bar so that the message can be read."""
        self._end(exception)

    def _total(self) -> list[float]:
        """Returns the sums of all ranks."""
        if self._trainer is None:
            return self._sums.tolist()
        sums = self._trainer.strategy.reduce(self._sums.clone(), reduce_op="sum")
        assert isinstance(sums, torch.Tensor)
        return sums.tolist()

    def _refuse_divergence(self) -> None:
        epoch, last = len(self._losses) - 1, self._losses[-1] if self._losses else 0.0
        if not math.isfinite(last):
            at_start = "the model or the labels of `valid` have values that are not finite"
            raise TrainingDivergedError(
                f"the validation loss of epoch {epoch} is {last}; "
                f"{self._advice if epoch else at_start}"
            )

    def _count(self, trainer: pl.Trainer) -> None:
        self._done += 1
        if self._progress is None:
            # Begins after the first batch, which is slower, so that the time left is right.
            epochs = self._settings.epochs
            total = self._validation + epochs * (self._steps + self._validation)
            self._progress = JobProgress(
                "batches", total, done=self._done, quiet=not trainer.is_global_zero
            )
            self._progress.__enter__()
        else:
            self._progress.update(self._done)

    def _end(self, error: BaseException | None = None) -> None:
        if self._progress is not None:
            self._progress.__exit__(type(error) if error else None, error, None)
            self._progress = None
