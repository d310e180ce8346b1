"""What happens between the steps: place in the data, redraw, checkpoints, a stop by signal."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, Checkpoint

from protlm.attention.base import RandomFeatures
from protlm.data.batching import Progress
from protlm.data.dataset import Batch
from protlm.model.checkpoint import checkpoint_name
from protlm.training.datamodule import SequenceData


class TrackProgress(Callback):
    """Tells the data module which samples were trained on, so that a checkpoint knows."""

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
    """Redraws random projections as a pure function of the optimiser step, outside `forward`."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Redraws where it is due, then takes rank 0's draw everywhere."""
        for module in pl_module.modules():
            if not isinstance(module, RandomFeatures) or module.redraw_every is None:
                continue
            index, rest = divmod(trainer.global_step, module.redraw_every)
            if rest == 0:
                module.redraw(index)
                for buffer in module.buffers(recurse=False):
                    # LAPACK's last bits differ between processors: all ranks take rank 0's.
                    buffer.copy_(trainer.strategy.broadcast(buffer))


class SaveCheckpoints(Checkpoint):
    """Saves every so many optimiser steps and at the end; keeps the newest few."""

    def __init__(self, directory: Path, *, every: int, keep: int) -> None:
        self.directory, self.every, self.keep = directory, every, max(keep, 2)
        self._saved = -1

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Saves when an optimiser step was made and one is due."""
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if stepped and (trainer.global_step % self.every == 0 or trainer.should_stop):
            self._save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Saves the last step, also when a signal ended the run."""
        self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        if step == self._saved:
            return
        # A file of this name may be there, damaged or left by a killed process: it is replaced.
        newest = self.directory / checkpoint_name(step)
        trainer.save_checkpoint(newest)
        self._saved = step
        if trainer.is_global_zero:
            older = [path for path in self.directory.glob("step-*.ckpt") if path < newest]
            for old in sorted(older)[: 1 - self.keep]:
                trainer.strategy.remove_checkpoint(old)


class StopOnSignal(Callback):
    """Ctrl-C or SIGTERM on any rank ends the run on all ranks after the same optimiser step.

    `received` is the signal's number, on every rank, or 0.
    """

    def __init__(self) -> None:
        self.received = 0
        # Apart from `received`: a signal that comes while the ranks agree must not be overwritten.
        self._noted = 0
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the signals over; a second one of a kind acts as it did before."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Lets the ranks agree, at an optimiser step's end only."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        mine = torch.tensor(self._noted, device=pl_module.device)
        self.received = int(trainer.strategy.reduce(mine, reduce_op="max"))
        trainer.should_stop = trainer.should_stop or self.received > 0
        assert trainer.val_check_batch is not None
        if trainer.should_stop and (batch_idx + 1) % int(trainer.val_check_batch):
            # Lightning validates whenever a run stops; only a validation that is due is wanted.
            trainer.limit_val_batches = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gives the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number
        handler: Callable[..., Any] | int | None = self._previous[number]
        signal.signal(number, handler)
