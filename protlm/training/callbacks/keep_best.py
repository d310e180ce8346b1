"""The epochs of a fine-tuning: their order, their lines, the best weights and the checkpoints."""

import math
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from protlm.checkpoints.format import all_checkpoints, checkpoint_name, remove
from protlm.system.errors import TrainingDivergedError
from protlm.system.lock import FolderLock
from protlm.system.paths import complete_file
from protlm.system.terminal import JobProgress
from protlm.training.callbacks.preemption import StopOnSignal
from protlm.training.finetuning import Finetuning
from protlm.training.labeled_batches import Batches, TokenRows
from protlm.training.lightning_internals import validate_now

_KEPT = 2


class KeepBest(Callback):
    """Sets the epoch of the batches, keeps the best parameters, and saves after each epoch.

    The parameters of the start are validated, too, and are the result if no epoch is better.

    Args:
        folder: the folder of the run.
        batches: the training batches.
        valid: the validation batches.
        patience: epochs without a lower validation loss after which training stops.
        stop: an epoch that it cut off is not saved, and is repeated by the resumed run.
        lock: the lock of the run, on the first rank; checked before each checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        batches: Batches,
        valid: Batches,
        *,
        patience: int,
        stop: StopOnSignal,
        lock: FolderLock | None = None,
    ) -> None:
        self._folder, self._batches, self._valid = folder, batches, valid
        self._patience, self._stop, self._lock = patience, stop, lock
        self._progress: JobProgress | None = None
        self._done = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gives each process its part of the batches."""
        for one in (self._batches, self._valid):
            one.share = (trainer.global_rank, trainer.world_size)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validates the start of a new run."""
        assert isinstance(pl_module, Finetuning)
        if not pl_module.losses:
            validate_now(trainer)
            if self._stop.received:
                # Not all labels were validated on; the resumed run begins here again.
                return
            self._compare(trainer, pl_module, train_loss=math.nan)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sets the epoch before the batches are read."""
        self._batches.epoch = trainer.current_epoch
        self._done = self._batches_until(trainer.current_epoch)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: TokenRows,
        batch_idx: int,
    ) -> None:
        """Counts a batch."""
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

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares the validation loss with the best one, and saves a checkpoint."""
        if self._stop.received:
            return
        assert isinstance(pl_module, Finetuning)
        if self._lock is not None:
            self._lock.check()
        self._compare(trainer, pl_module, train_loss=pl_module.train_loss())
        trainer.should_stop |= pl_module.stale_epochs >= self._patience
        folder = self._folder / "checkpoints"
        trainer.save_checkpoint(folder / checkpoint_name(trainer.global_step))
        if trainer.is_global_zero:
            for path in all_checkpoints(self._folder)[:-_KEPT]:
                remove(path)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the progress report."""
        assert isinstance(pl_module, Finetuning)
        if self._progress is not None and not self._stop.received and pl_module.start_is_best:
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

    def _compare(self, trainer: pl.Trainer, module: Finetuning, *, train_loss: float) -> None:
        """Adds the losses of an epoch, writes and prints them, and keeps the best parameters."""
        module.losses.append([train_loss, *module.valid_scores()])
        if trainer.is_global_zero:
            self._write(module)
        loss = module.losses[-1][1]
        if not math.isfinite(loss):
            advice = f"remove {self._folder} and type a smaller --learning-rate"
            if len(module.losses) == 1:
                advice = "the model or the labels of `valid` have values that are not finite"
            raise TrainingDivergedError(
                f"the validation loss of epoch {len(module.losses) - 1} is {loss}; {advice}"
            )
        module.stale_epochs += 1
        if loss < module.best_loss:
            module.best_loss, module.best = loss, module.trained_state()
            module.stale_epochs = 0
        self._print(trainer, module)

    def _batches_until(self, epoch: int) -> int:
        """Returns the number of batches before an epoch; those of the start's validation count."""
        return len(self._valid) + epoch * (len(self._batches) + len(self._valid))

    def _count(self, trainer: pl.Trainer) -> None:
        self._done += 1
        if self._progress is None:
            # Begins after the first batch, which is slower, so that the time left is right.
            assert trainer.max_epochs is not None
            total = self._batches_until(trainer.max_epochs)
            self._progress = JobProgress(
                "batches", total, done=self._done, quiet=not trainer.is_global_zero
            )
            self._progress.__enter__()
        else:
            self._progress.update(self._done)

    def _print(self, trainer: pl.Trainer, module: Finetuning) -> None:
        assert self._progress is not None
        train, valid, metric = module.losses[-1]
        scores = f"validation {module.metric.name} {metric:.3f}, loss {valid:.4f}"
        epoch = len(module.losses) - 1
        if not epoch:
            self._progress.print(f"epoch 0, before training: {scores}")
            return
        kept = "" if module.stale_epochs else ", the lowest so far"
        self._progress.print(
            f"epoch {epoch} of {trainer.max_epochs} at most: training loss {train:.4f}, "
            f"{scores}{kept}"
        )

    def _write(self, module: Finetuning) -> None:
        columns = ["epoch", "train_loss", "valid_loss", f"valid_{module.metric.name}"]
        lines = [",".join(columns)]
        for number, values in enumerate(module.losses):
            cells = [f"{value:.6f}" for value in values]
            if not number:
                # There is no training loss of the start.
                cells[0] = ""
            lines.append(",".join([str(number), *cells]))
        with complete_file(self._folder / "metrics.csv", overwrite=True) as temporary:
            temporary.write_text("\n".join([*lines, ""]))

    def _end(self, error: BaseException | None = None) -> None:
        if self._progress is not None:
            self._progress.__exit__(type(error) if error else None, error, None)
            self._progress = None
