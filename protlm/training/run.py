"""One training run in one directory: continue what is there, train, leave checkpoints and logs."""

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.profilers import Profiler
from pytorch_lightning.strategies import DDPStrategy, Strategy

from protlm.config import LoggerConfig, TrainerConfig
from protlm.config import Strategy as StrategyName
from protlm.errors import ExitCode, UserError
from protlm.model.checkpoint import newest_whole, step_of
from protlm.training.bad_numbers import WatchBadSteps
from protlm.training.callbacks import (
    AgreeOnStart,
    FinishValidation,
    RedrawFeatures,
    TrackProgress,
)
from protlm.training.checkpoint_io import VerifiedCheckpointIO
from protlm.training.compilation import RunEagerly, compile_blocks
from protlm.training.data_wait import DataWait
from protlm.training.datamodule import SequenceData
from protlm.training.denominators import WatchDenominators
from protlm.training.ema import AverageWeights
from protlm.training.estimate import WatchEstimates
from protlm.training.launch import (
    ReportStall,
    check_launch,
    cluster_environment,
    is_first_rank,
    lost_ranks_explained,
)
from protlm.training.loggers import make_loggers
from protlm.training.metrics import is_validated
from protlm.training.module import LanguageModeling
from protlm.training.monitor import Monitor
from protlm.training.preemption import StopOnSignal
from protlm.training.save_checkpoints import SaveCheckpoints
from protlm.training.sharding import ShardedStrategy, check_sharding

PRECISIONS = ("32-true", "bf16-mixed")
# Sums are float64, which Apple's GPUs do not have.
ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
# More processes than processors are of use to nobody but who tries out a launch.
_MOST_RANKS = 4


@dataclass(frozen=True)
class Finished:
    """How a run ended: after which step, and with which exit code."""

    step: int
    exit_code: ExitCode


def check_trainer(config: TrainerConfig) -> None:
    """Refuses settings that cannot work, before anything is read.

    Raises:
        UserError: names the setting and what is allowed.
    """
    if config.precision not in PRECISIONS:
        raise UserError(
            f"trainer.precision={config.precision} is not one of {', '.join(PRECISIONS)}; "
            "float16 and weights in bfloat16 are too coarse for a Performer's features"
        )
    if config.accelerator not in ACCELERATORS:
        raise UserError(
            f"trainer.accelerator={config.accelerator} is not one of {', '.join(ACCELERATORS)}"
        )
    if config.accelerator in ("gpu", "cuda") and torch.cuda.device_count() < config.devices:
        raise UserError(
            f"trainer.accelerator={config.accelerator} trainer.devices={config.devices}: this "
            f"machine has {torch.cuda.device_count()} GPUs that torch can use; type "
            "trainer.accelerator=cpu, or fewer devices"
        )
    processors = os.cpu_count() or 1
    if _accelerator(config.accelerator) == "cpu" and config.devices > _MOST_RANKS * processors:
        raise UserError(
            f"trainer.devices={config.devices} on the CPU is a process each, and this machine has "
            f"{processors} processors; type trainer.devices={processors} or fewer"
        )
    check_launch(config)


def train(
    module: LanguageModeling,
    data: SequenceData,
    *,
    config: TrainerConfig,
    logger: LoggerConfig,
    run_dir: Path,
) -> Finished:
    """Trains until `config.max_steps`, or until a signal, and saves a checkpoint at the end."""
    checkpoint, faults = newest_whole(run_dir)
    if is_first_rank():
        for fault in faults:
            warnings.warn(f"{fault}; the run goes on from {checkpoint}", stacklevel=2)
    check_sharding(config.strategy, module.network, checkpoint)
    step = 0 if checkpoint is None else step_of(checkpoint)
    lacks_validation = _lacks_validation(run_dir, step, config)
    if step >= config.max_steps and not lacks_validation:
        return Finished(step, ExitCode.OK)
    # Lightning's notices on devices and products are not this program's to give.
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    stop, data_wait = StopOnSignal(), DataWait()
    watches = (
        WatchEstimates(module.network, every=config.log_every),
        WatchDenominators(module.network, every=config.log_every),
    )
    columns = [column for watch in watches for column in watch.columns]
    callbacks = _callbacks(config, run_dir, data, data_wait=data_wait, watches=watches)
    callbacks += [stop, SaveCheckpoints(run_dir, config, from_step=step)]
    if config.compile:
        compile_blocks(module.network)
        callbacks.append(RunEagerly(config.log_every if columns else None))
    if lacks_validation:
        callbacks.append(FinishValidation(config.max_steps))
    trainer = _trainer(
        config,
        run_dir,
        loggers=make_loggers(logger, run_dir, from_step=step, more_columns=columns),
        callbacks=callbacks,
        profiler=data_wait,
        batches_per_step=config.accumulate * data.share.parts,
    )
    with warnings.catch_warnings(), lost_ranks_explained(config):
        for message in _KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        try:
            trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
        except SystemExit:
            # Lightning ends the process with 1 at Ctrl-C before the first step.
            raise KeyboardInterrupt from None
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
    watches: Sequence[Callback],
) -> list[Callback]:
    """What happens in a run before it is asked whether to stop and to save, in this order."""
    average = [] if config.ema_decay is None else [AverageWeights(config.ema_decay)]
    return [
        AgreeOnStart(),
        TrackProgress(),
        RedrawFeatures(),
        *average,
        Monitor(
            every=config.log_every,
            max_steps=config.max_steps,
            data_wait=data_wait,
            peak=config.peak_tflops,
        ),
        *watches,
        WatchBadSteps(
            run_dir,
            data.train.identifier,
            max_in_a_row=config.max_bad_steps,
            spike_guard=config.spike_guard,
        ),
        ReportStall(timeout_minutes=config.timeout_minutes),
    ]


def _lacks_validation(run_dir: Path, step: int, config: TrainerConfig) -> bool:
    """Whether the validation that is due after this step was cut off, or not begun."""
    is_due = step > 0 and step % _valid_interval(config) == 0
    return is_due and not is_validated(run_dir, step)


def _valid_interval(config: TrainerConfig) -> int:
    """Optimiser steps between two validations: a short run has one at its end."""
    return min(config.valid_every, config.max_steps)


# Lightning's advice that does not apply here, each with the reason.
_KNOWN_WARNINGS = (
    ".*does not have many workers.*",  # tokens come from a memory map: workers gain nothing
    ".*LeafSpec.*deprecated.*",  # Lightning's own use of torch
    # The two are what torch's compiler does to the tensors and functions that it traces.
    "The .grad attribute of a Tensor that is not a leaf Tensor .*",
    ".*autograd.function.Function.* should not be instantiated.*",
    "FSDP2-wrapped module .* returned a view tensor.*",  # logits, which nothing changes in place
    ".*on tasks.*srun.*",  # said when SLURM is installed but not used
    "You're resuming from a checkpoint that ended before the epoch ended.*",  # resumed exactly
)


def _trainer(
    config: TrainerConfig,
    run_dir: Path,
    *,
    loggers: list[Logger],
    callbacks: list[Callback],
    profiler: Profiler,
    batches_per_step: int,
) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=run_dir,
        accelerator=_accelerator(config.accelerator),
        devices=config.devices,
        num_nodes=config.num_nodes,
        strategy=_strategy(config),
        precision=config.precision,  # pyright: ignore[reportArgumentType]
        max_steps=config.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=batches_per_step,
        gradient_clip_val=config.gradient_clip,
        val_check_interval=_valid_interval(config) * batches_per_step,
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
    """What `auto` is; Lightning's would take any kind of device."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _strategy(config: TrainerConfig) -> Strategy | str:
    """One process, or ranks that do not wait for each other for ever."""
    world_size = config.devices * config.num_nodes
    timeout = timedelta(minutes=config.timeout_minutes)
    if config.strategy is StrategyName.fsdp:
        return ShardedStrategy(world_size, timeout=timeout)
    if config.strategy is StrategyName.auto and world_size == 1:
        return "auto"
    return DDPStrategy(timeout=timeout, gradient_as_bucket_view=True)
