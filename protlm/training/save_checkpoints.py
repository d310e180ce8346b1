"""When checkpoints are saved, which of them stay, and what a failure to save one means."""

import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint

from protlm.config import OnSaveError, TrainerConfig
from protlm.data.dataset import Batch
from protlm.errors import OutputError
from protlm.model.checkpoint import (
    CHECKPOINTS,
    all_checkpoints,
    checkpoint_name,
    remove,
    step_of,
    sweep,
)
from protlm.training.best import best_checkpoints
from protlm.training.checkpoint_io import VerifiedCheckpointIO


class SaveCheckpoints(Checkpoint):
    """Saves every so many optimiser steps and minutes, and at the end; keeps the newest and best.

    Args:
        run_dir: the directory of the run.
        config: when to save, and what to keep.
        from_step: the step that the run goes on from, whose checkpoint is there.
    """

    def __init__(self, run_dir: Path, config: TrainerConfig, *, from_step: int) -> None:
        self._run_dir, self._config = run_dir, config
        self._saved = from_step
        self._save_time = time.monotonic()
        # Checkpoints that the run went back behind, because they are damaged, are neither counted
        # nor removed; when the run comes to their step again they are replaced.
        left = (path for path in all_checkpoints(run_dir) if step_of(path) > from_step)
        self._left_behind = {path.name for path in left}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Removes what a killed process left unfinished."""
        if trainer.is_global_zero:
            sweep(self._run_dir)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Leaves the counters of validation batches out: a validation that is cut off is redone."""
        fit_loop = checkpoint["loops"]["fit_loop"]
        kept = {key: state for key, state in fit_loop.items() if ".val_loop." not in key}
        checkpoint["loops"] = {"fit_loop": kept}

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Saves when an optimiser step was made and a checkpoint is due."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and self._is_due(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Saves when a signal came, and makes room when another checkpoint is the best."""
        if trainer.should_stop:
            self._save(trainer)
        else:
            self._prune(trainer)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        """Whether to save after this step; the same on all ranks."""
        step, config = trainer.global_step, self._config
        is_last = trainer.should_stop or step >= config.max_steps
        is_candidate = config.keep_best > 0 and step % config.valid_every == 0
        is_due = is_last or is_candidate or step % config.checkpoint_every == 0
        return is_due or self._is_time(trainer)

    def _is_time(self, trainer: pl.Trainer) -> bool:
        """Whether so many minutes have gone by; the first rank's clock decides for all."""
        if self._config.checkpoint_minutes is None:
            return False
        late = time.monotonic() - self._save_time >= 60 * self._config.checkpoint_minutes
        mine = torch.tensor(
            int(late and trainer.is_global_zero), device=trainer.strategy.root_device
        )
        return bool(trainer.strategy.reduce(mine, reduce_op="max"))

    def _save(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        if step == self._saved:
            return
        path = self._run_dir / CHECKPOINTS / checkpoint_name(step)
        for logger in trainer.loggers:
            logger.save()
        trainer.save_checkpoint(path)
        self._save_time = time.monotonic()
        io = trainer.strategy.checkpoint_io
        assert isinstance(io, VerifiedCheckpointIO)
        failure = trainer.strategy.broadcast(io.failure)
        if failure is None:
            self._saved = step
            self._left_behind.discard(path.name)
            self._prune(trainer)
        else:
            self._report(failure, trainer)

    def _report(self, failure: str, trainer: pl.Trainer) -> None:
        """Warns, or ends the run on all ranks.

        Raises:
            OutputError: the run is to stop, or has come to its end with nothing to show for it.
        """
        last = f"step {self._saved}" if self._saved else "none"
        failure = f"{failure}; the last checkpoint is {last}"
        is_last = trainer.should_stop or trainer.global_step >= self._config.max_steps
        if is_last or self._config.on_save_error is OnSaveError.stop:
            raise OutputError(f"{failure}; the same command goes on from there")
        if trainer.is_global_zero:
            warnings.warn(f"{failure}; the training goes on", stacklevel=2)

    def _prune(self, trainer: pl.Trainer) -> None:
        """Removes what is neither among the newest nor among the best."""
        if not trainer.is_global_zero:
            return
        config = self._config
        paths = [p for p in all_checkpoints(self._run_dir) if p.name not in self._left_behind]
        kept = set(paths[-max(config.keep_checkpoints, 2) :])
        kept |= set(best_checkpoints(self._run_dir, config.best_metric, config.keep_best))
        for path in paths:
            if path not in kept:
                # What cannot be removed now is tried again after the next checkpoint.
                with suppress(OSError):
                    remove(path)
