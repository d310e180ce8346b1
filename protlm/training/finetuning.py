"""The run of a fine-tuning: the loop of every training, with epochs, and the best weights kept."""

import os
from pathlib import Path

import torch
from pytorch_lightning.plugins.environments import (
    LightningEnvironment,  # pyright: ignore[reportPrivateImportUsage]
)

from protlm.checkpoints.best import best_checkpoints
from protlm.checkpoints.format import load_training
from protlm.config import BestMetric, OnSaveError, TrainerConfig
from protlm.system.errors import ExitCode, UserError
from protlm.system.lock import FolderLock
from protlm.training.callbacks.epochs import ReportEpochs, stale_epochs, valid_losses
from protlm.training.devices import MOST_RANKS
from protlm.training.labeled_batches import LabeledData
from protlm.training.labels import FinetuneSettings, LabelLearning
from protlm.training.launch import leave_other_ranks
from protlm.training.loggers import CsvFile
from protlm.training.run import Run, fit, last_step, newest_checkpoint


def check_devices(settings: FinetuneSettings) -> None:
    """Makes sure that the devices exist, and that each gets a protein of a batch."""
    devices, is_gpu = settings.devices, settings.device.startswith("cuda")
    there = torch.cuda.device_count() if is_gpu else MOST_RANKS * (os.cpu_count() or 1)
    if devices > there:
        what = "GPUs that torch can use" if is_gpu else "as the most processes for its processors"
        raise UserError(f"--devices {devices}: this machine has {there} {what}; type fewer")
    if devices > settings.batch_size:
        raise UserError(
            f"--devices {devices} divide the --batch-size {settings.batch_size}; type as many "
            "proteins or more"
        )


def finetune(
    module: LabelLearning,
    data: LabeledData,
    *,
    folder: Path,
    settings: FinetuneSettings,
    lock: FolderLock | None = None,
) -> ExitCode:
    """Trains until the patience or the epochs end, and sets the best weights.

    A run that was interrupted continues from its last checkpoint in the folder. With several
    devices, Lightning starts the command again for each of the others; all ranks return. The code
    is not 0 if a signal ended the training.
    """
    checkpoint = newest_checkpoint(folder)
    step = last_step(checkpoint)
    if checkpoint is None or stale_epochs(valid_losses(folder, until=step)) < settings.patience:
        columns = ("epoch", "train_loss", "valid_loss", f"valid_{module.metric.name}")
        run = Run(
            folder,
            _config(settings, data.steps_per_epoch),
            checkpoint,
            lock,
            [ReportEpochs(folder, data, settings)],
            [CsvFile(folder, columns, from_step=step)],
            # Also in a job of SLURM, whose tasks would otherwise be taken for the ranks.
            [LightningEnvironment()],
        )
        device = next(module.parameters()).device
        finished = fit(module.train(), data, run)
        leave_other_ranks()
        # Lightning leaves the weights on the CPU.
        module.to(device)
        if finished.exit_code:
            return finished.exit_code
    (best,) = best_checkpoints(folder, BestMetric.valid_loss, 1)
    module.load_state_dict(load_training(best)["state_dict"])
    return ExitCode.OK


def _config(settings: FinetuneSettings, steps_per_epoch: int) -> TrainerConfig:
    """Returns the settings of the loop: a validation and a checkpoint after each epoch."""
    return TrainerConfig(
        max_steps=settings.epochs * steps_per_epoch,
        accelerator=settings.device if settings.device.startswith("cuda") else "cpu",
        devices=settings.devices,
        precision="32-true",
        gradient_clip=0.0,
        valid_every=steps_per_epoch,
        checkpoint_every=steps_per_epoch,
        keep_checkpoints=2,
        keep_best=1,
        on_save_error=OnSaveError.stop,
    )
