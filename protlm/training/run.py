"""A training run: resumes the run in its directory, trains, and writes checkpoints and logs."""

import logging
import os
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.profilers import Profiler
from pytorch_lightning.strategies import DDPStrategy, Strategy

from protlm.checkpoints.format import newest_whole, read_facts, step_of
from protlm.checkpoints.metrics import is_validated
from protlm.config import Strategy as StrategyName
from protlm.config import TrainConfig, TrainerConfig
from protlm.loading import refuse_bounded_exact_heads
from protlm.system.errors import ExitCode, UserError
from protlm.system.lock import FolderLock
from protlm.training.callbacks.data_progress import TrackDataProgress
from protlm.training.callbacks.ema import AverageWeights
from protlm.training.callbacks.estimate import WatchEstimates
from protlm.training.callbacks.history import WriteHistory
from protlm.training.callbacks.monitor import Monitor
from protlm.training.callbacks.preemption import StopOnSignal
from protlm.training.callbacks.probe import Probe, ProbeModel
from protlm.training.callbacks.redraw import RedrawFeatures
from protlm.training.callbacks.resume_validation import ResumeValidation, ValidateLastStep
from protlm.training.callbacks.same_step import CheckSameStep
from protlm.training.callbacks.save_checkpoints import SaveCheckpoints
from protlm.training.callbacks.skipped_steps import SkipBadSteps
from protlm.training.callbacks.stall import StallWatchdog
from protlm.training.checkpoint_io import VerifiedCheckpointIO
from protlm.training.compilation import RunEagerly, compile_blocks
from protlm.training.data_wait import DataWait
from protlm.training.datamodule import SequenceData
from protlm.training.launch import (
    check_launch,
    cluster_environment,
    is_first_rank,
    loader_errors_explained,
    lost_ranks_explained,
)
from protlm.training.lightning_internals import (
    end_with_exit_code_of_ranks,
    quiet_and_interruptible,
)
from protlm.training.loggers import make_loggers
from protlm.training.module import LanguageModeling
from protlm.training.precision import PRECISIONS, resolved_precision

# Sums are float64, which Apple's GPUs do not support.
ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
# Ranks per processor: more than one is useful only to test a launch.
_MOST_RANKS = 4


@dataclass(frozen=True)
class Finished:
    """The last step and the exit code of a run."""

    step: int
    exit_code: ExitCode


def check_trainer(config: TrainerConfig) -> None:
    """Rejects settings that cannot work, before anything is read."""
    if config.precision not in PRECISIONS:
        raise UserError(
            f"trainer.precision={config.precision} is not one of {', '.join(PRECISIONS)}; "
            "float16 and bfloat16 weights are not precise enough for a Performer's features"
        )
    if config.accelerator not in ACCELERATORS:
        raise UserError(
            f"trainer.accelerator={config.accelerator} is not one of {', '.join(ACCELERATORS)}"
        )
    is_gpu = _accelerator(config.accelerator) != "cpu"
    if is_gpu and torch.cuda.device_count() < config.devices:
        raise UserError(
            f"trainer.accelerator={config.accelerator} trainer.devices={config.devices}: this "
            f"machine has {torch.cuda.device_count()} GPUs that torch can use; type "
            "trainer.accelerator=cpu, or fewer devices"
        )
    processors = os.cpu_count() or 1
    if _accelerator(config.accelerator) == "cpu" and config.devices > _MOST_RANKS * processors:
        raise UserError(
            f"trainer.devices={config.devices} on the CPU starts as many processes, and this "
            f"machine has {processors} processors; type trainer.devices={processors} or fewer"
        )
    check_launch(config)


def find_checkpoint(
    module: LanguageModeling, data: SequenceData, *, config: TrainerConfig, run_dir: Path
) -> Path | None:
    """Returns the checkpoint that a run continues from, complete or not; None if it has none."""
    checkpoint, faults = newest_whole(run_dir)
    if is_first_rank():
        for fault in faults:
            warnings.warn(f"{fault}; resuming from {checkpoint}", stacklevel=2)
    if checkpoint is not None:
        if (step := step_of(checkpoint)) > config.max_steps:
            raise UserError(
                f"{run_dir} is at step {step}, after trainer.max_steps={config.max_steps}; type "
                f"trainer.max_steps={step} or more"
            )
        contents = read_facts(checkpoint)
        refuse_bounded_exact_heads(checkpoint, module.description, contents.get("state_dict", ()))
        module.check_continues(contents)
        # A checkpoint that lacks the position is rejected when it is loaded.
        if place := contents.get(type(data).__qualname__):
            data.check_continues(place)
    return checkpoint


def train(
    module: LanguageModeling,
    data: SequenceData,
    *,
    settings: TrainConfig,
    checkpoint: Path | None,
    probe: Probe | None = None,
    lock: FolderLock | None = None,
) -> Finished:
    """Trains until `trainer.max_steps` or until a signal, and saves a final checkpoint.

    It continues from the checkpoint of `find_checkpoint`. A probe is measured every
    `trainer.probe_every` steps. Before each checkpoint the first rank checks its lock.
    """
    run_dir, config = Path(settings.run_dir), settings.trainer
    step = 0 if checkpoint is None else step_of(checkpoint)
    lacks_validation = _lacks_validation(run_dir, step, config)
    if step >= config.max_steps and not lacks_validation:
        return Finished(step, ExitCode.OK)
    # Hides Lightning's notices about devices and its products.
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    stop, data_wait = StopOnSignal(), DataWait()
    estimates = WatchEstimates(module.network, every=config.log_every)
    callbacks = _callbacks(config, run_dir, data, data_wait=data_wait, estimates=estimates)
    columns = list(estimates.columns)
    if probe is not None and config.probe_every is not None:
        callbacks.append(ProbeModel(probe, every=config.probe_every))
        columns += probe.columns
    callbacks += [stop, SaveCheckpoints(run_dir, config, from_step=step, lock=lock)]
    if config.compile:
        compile_blocks(module.network)
        callbacks.append(RunEagerly(config.log_every if estimates.columns else None))
    if lacks_validation:
        callbacks.append(ResumeValidation(config.max_steps))
    trainer = _trainer(
        config,
        run_dir,
        loggers=make_loggers(settings.logger, run_dir, from_step=step, more_columns=columns),
        callbacks=callbacks,
        profiler=data_wait,
        batches_per_step=config.accumulate_grad_batches * data.share.parts,
    )
    end_with_exit_code_of_ranks()
    with (
        quiet_and_interruptible(),
        lost_ranks_explained(config),
        loader_errors_explained(
            data.config.num_workers, lambda: data.train.size_fault() or data.valid.size_fault()
        ),
    ):
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    step = trainer.global_step
    is_cut_off = stop.received and _lacks_validation(run_dir, step, config)
    is_complete = step >= config.max_steps and not is_cut_off
    return Finished(step, ExitCode.OK if is_complete else stop.exit_code)


def _callbacks(
    config: TrainerConfig,
    run_dir: Path,
    data: SequenceData,
    *,
    data_wait: DataWait,
    estimates: WatchEstimates,
) -> list[Callback]:
    """Returns the callbacks that run before those that stop and save, in this order."""
    average = [] if config.ema_decay is None else [AverageWeights(config.ema_decay)]
    return [
        CheckSameStep(),
        TrackDataProgress(),
        RedrawFeatures(),
        *average,
        Monitor(
            every=config.log_every,
            max_steps=config.max_steps,
            data_wait=data_wait,
            peak=config.peak_tflops,
        ),
        estimates,
        SkipBadSteps(
            run_dir,
            data.train.identifier,
            max_in_a_row=config.max_bad_steps,
            max_gradient_norm_ratio=config.max_gradient_norm_ratio,
        ),
        StallWatchdog(timeout_minutes=config.timeout_minutes),
        WriteHistory(run_dir),
        ValidateLastStep(config.max_steps),
    ]


def _lacks_validation(run_dir: Path, step: int, config: TrainerConfig) -> bool:
    """Returns whether the validation after this step is due but not in the log."""
    is_due = step > 0 and (step % config.valid_every == 0 or step >= config.max_steps)
    return is_due and not is_validated(run_dir, step)


def _trainer(
    config: TrainerConfig,
    run_dir: Path,
    *,
    loggers: list[Logger],
    callbacks: list[Callback],
    profiler: Profiler,
    batches_per_step: int,
) -> pl.Trainer:
    accelerator = _accelerator(config.accelerator)
    precision = resolved_precision(config.precision, accelerator)
    return pl.Trainer(
        default_root_dir=run_dir,
        accelerator=accelerator,
        devices=config.devices,
        num_nodes=config.num_nodes,
        strategy=_strategy(config),
        precision=precision,  # pyright: ignore[reportArgumentType]
        max_steps=config.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=batches_per_step,
        gradient_clip_val=config.gradient_clip,
        val_check_interval=config.valid_every * batches_per_step,
        check_val_every_n_epoch=None,
        limit_val_batches=config.valid_batches,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=loggers,
        plugins=[VerifiedCheckpointIO(), *cluster_environment()],
        callbacks=callbacks,
        profiler=profiler,
    )


def _accelerator(name: str) -> str:
    """Resolves `auto`; Lightning's `auto` would select any type of device."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _strategy(config: TrainerConfig) -> Strategy | str:
    """Returns the strategy: a single process, or ranks with a time-out."""
    if config.strategy is StrategyName.auto and config.devices * config.num_nodes == 1:
        return "auto"
    timeout = timedelta(minutes=config.timeout_minutes)
    return DDPStrategy(timeout=timeout, gradient_as_bucket_view=True)
