"""The run of a fine-tuning: resumes the run in its folder, and trains on one or several devices."""

import logging
import os
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import (
    LightningEnvironment,  # pyright: ignore[reportPrivateImportUsage]
)
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DataLoader

from protlm.checkpoints.format import load_training, newest_whole
from protlm.system.errors import ExitCode, UserError
from protlm.system.lock import FolderLock
from protlm.training.callbacks.keep_best import KeepBest
from protlm.training.callbacks.preemption import StopOnSignal
from protlm.training.checkpoint_io import VerifiedCheckpointIO
from protlm.training.finetuning import FinetuneSettings, Finetuning
from protlm.training.labeled_batches import Batches, LabeledTokens
from protlm.training.launch import is_first_rank, leave_other_ranks
from protlm.training.lightning_internals import (
    end_with_exit_code_of_ranks,
    quiet_and_interruptible,
)

# Ranks per processor: more than one is useful only to test a launch.
_MOST_RANKS = 4


def check_devices(settings: FinetuneSettings) -> None:
    """Makes sure that the devices exist, and that each gets a protein of a batch."""
    devices, is_gpu = settings.devices, settings.device.startswith("cuda")
    there = torch.cuda.device_count() if is_gpu else _MOST_RANKS * (os.cpu_count() or 1)
    if devices > there:
        what = "GPUs that torch can use" if is_gpu else "as the most processes for its processors"
        raise UserError(f"--devices {devices}: this machine has {there} {what}; type fewer")
    if devices > settings.batch_size:
        raise UserError(
            f"--devices {devices} divide the --batch-size {settings.batch_size}; type as many "
            "proteins or more"
        )


def finetune(
    module: Finetuning,
    train: LabeledTokens,
    valid: LabeledTokens,
    *,
    folder: Path,
    settings: FinetuneSettings,
    lock: FolderLock | None = None,
) -> ExitCode:
    """Trains until the patience or the epochs end, and sets the best parameters.

    A run that was interrupted continues after its last complete epoch. With several devices,
    Lightning starts the command again for each of the others; all ranks return.

    Args:
        module: the network and its head.
        train: the proteins that are trained on.
        valid: the proteins that decide when to stop.
        folder: the folder of checkpoints and `metrics.csv`.
        settings: the settings.
        lock: the lock of the folder, which the first rank checks before each checkpoint.

    Returns:
        Not 0 if a signal ended the training.
    """
    checkpoint, faults = newest_whole(folder)
    if is_first_rank():
        for fault in faults:
            warnings.warn(f"{fault}; resuming from {checkpoint}", stacklevel=2)
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    if checkpoint is not None:
        contents = load_training(checkpoint)
        module.on_load_checkpoint(contents)
        if module.stale_epochs >= settings.patience:
            module.load_state_dict(module.best, strict=False)
            return ExitCode.OK
    stop, batches = StopOnSignal(), Batches(train, settings.batch_size, seed=settings.seed)
    tested = Batches(valid, settings.batch_size, seed=None)
    module.warmup_steps = max(len(batches) // 10, 1)
    keep = KeepBest(folder, batches, tested, patience=settings.patience, stop=stop, lock=lock)
    trainer = _trainer(settings, folder, keep, stop)
    if settings.devices > 1:
        end_with_exit_code_of_ranks()
    device = next(module.parameters()).device
    with quiet_and_interruptible():
        trainer.fit(
            module.train(),
            DataLoader(batches, batch_size=None),
            DataLoader(tested, batch_size=None),
            ckpt_path=checkpoint,
            weights_only=True,
        )
    leave_other_ranks()
    # Lightning leaves the weights on the CPU.
    module.to(device)
    if stop.received:
        return stop.exit_code
    module.load_state_dict(module.best, strict=False)
    return ExitCode.OK


def _trainer(
    settings: FinetuneSettings, folder: Path, keep: KeepBest, stop: StopOnSignal
) -> pl.Trainer:
    is_gpu, devices = settings.device.startswith("cuda"), settings.devices
    return pl.Trainer(
        default_root_dir=folder,
        accelerator="gpu" if is_gpu else "cpu",
        devices=[torch.device(settings.device).index or 0] if is_gpu and devices == 1 else devices,
        # The loss does not depend on the head of the language model.
        strategy=DDPStrategy(find_unused_parameters=True) if devices > 1 else "auto",
        max_epochs=settings.epochs,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        # Also in a job of SLURM, whose tasks would otherwise be taken for the ranks.
        plugins=[VerifiedCheckpointIO(), LightningEnvironment()],
        callbacks=[keep, stop],
    )
