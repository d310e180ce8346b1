"""One training run in one directory: continue what is there, train, leave checkpoints and logs."""

import logging
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import Logger

from protlm.config import LoggerConfig, TrainerConfig
from protlm.errors import ExitCode, UserError
from protlm.model.checkpoint import CHECKPOINTS, latest, load_training
from protlm.training.callbacks import RedrawFeatures, SaveCheckpoints, StopOnSignal, TrackProgress
from protlm.training.checkpoint_io import VerifiedCheckpointIO
from protlm.training.datamodule import SequenceData
from protlm.training.estimate import WatchEstimates
from protlm.training.loggers import make_loggers
from protlm.training.module import LanguageModeling
from protlm.training.monitor import Monitor

PRECISIONS = ("32-true", "bf16-mixed")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")


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


def train(
    module: LanguageModeling,
    data: SequenceData,
    *,
    config: TrainerConfig,
    logger: LoggerConfig,
    run_dir: Path,
) -> Finished:
    """Trains until `config.max_steps`, or until a signal, and saves a checkpoint at the end."""
    checkpoint = latest(run_dir)
    step = 0
    if checkpoint is not None:
        contents = load_training(checkpoint)
        step = int(contents["global_step"])
        data.load_state_dict(contents[SequenceData.__name__])
    if step >= config.max_steps:
        return Finished(step, ExitCode.OK)
    # Lightning's notices on devices and products are not this program's to give.
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    stop = StopOnSignal()
    watch = WatchEstimates(module.network, every=config.log_every)
    loggers = make_loggers(logger, run_dir, from_step=step, more_columns=watch.columns)
    trainer = _trainer(config, run_dir, loggers=loggers, watch=watch, stop=stop)
    with warnings.catch_warnings():
        for message in _KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        try:
            trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
        except SystemExit:
            # Lightning ends the process with 1 at a second Ctrl-C.
            raise KeyboardInterrupt from None
    if trainer.global_step >= config.max_steps:
        return Finished(trainer.global_step, ExitCode.OK)
    codes = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.PREEMPTED}
    return Finished(trainer.global_step, codes[signal.Signals(stop.received)])


# Lightning's advice that does not apply here, each with the reason.
_KNOWN_WARNINGS = (
    ".*does not have many workers.*",  # tokens come from a memory map: workers gain nothing
    ".*LeafSpec.*deprecated.*",  # Lightning's own use of torch
    ".*on tasks.*srun.*",  # said when SLURM is installed but not used
    "You're resuming from a checkpoint that ended before the epoch ended.*",  # resumed exactly
)


def _trainer(
    config: TrainerConfig,
    run_dir: Path,
    *,
    loggers: list[Logger],
    watch: WatchEstimates,
    stop: StopOnSignal,
) -> pl.Trainer:
    many = config.devices * config.num_nodes > 1
    checkpoints = SaveCheckpoints(
        run_dir / CHECKPOINTS, every=config.checkpoint_every, keep=config.keep_checkpoints
    )
    return pl.Trainer(
        default_root_dir=run_dir,
        accelerator=config.accelerator,
        devices=config.devices,
        num_nodes=config.num_nodes,
        strategy="ddp" if many else "auto",
        precision=config.precision,  # pyright: ignore[reportArgumentType]
        max_steps=config.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=config.accumulate,
        gradient_clip_val=config.gradient_clip,
        val_check_interval=min(config.valid_every, config.max_steps) * config.accumulate,
        check_val_every_n_epoch=None,
        limit_val_batches=config.valid_batches,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=loggers,
        plugins=[VerifiedCheckpointIO()],
        callbacks=[
            TrackProgress(),
            RedrawFeatures(),
            Monitor(every=config.log_every, max_steps=config.max_steps),
            watch,
            stop,
            checkpoints,
        ],
    )
