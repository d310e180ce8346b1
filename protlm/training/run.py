"""The loop of every training: resumes the run in its folder, writes checkpoints and logs."""

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.plugins.environments import ClusterEnvironment  # pyright: ignore[reportPrivateImportUsage]
from pytorch_lightning.profilers import Profiler

from protlm.checkpoints.format import newest_whole, read_facts, step_of
from protlm.checkpoints.validations import is_validated
from protlm.config import TrainerConfig
from protlm.config.composition import to_plain
from protlm.system.errors import ExitCode, UserError
from protlm.system.lock import FolderLock
from protlm.training.callbacks.estimate import WatchEstimates
from protlm.training.callbacks.hooks import (
    AverageWeights,
    CheckSameStep,
    LoopCallback,
    RedrawFeatures,
    ResumeValidation,
    RunEagerly,
    StallWatchdog,
    TrackDataProgress,
    ValidateLastStep,
    compile_model,
)
from protlm.training.callbacks.monitor import DataWait, MeasureModel, Monitor
from protlm.training.callbacks.preemption import StopOnSignal
from protlm.training.callbacks.save_checkpoints import (
    SaveCheckpoints,
    VerifiedCheckpointIO,
    WriteHistory,
)
from protlm.training.callbacks.skipped_steps import SkipBadSteps
from protlm.training.datamodule import SequenceData
from protlm.training.launch import (
    cluster_environment,
    is_first_rank,
    loader_errors_explained,
    lost_ranks_explained,
    strategy,
)
from protlm.training.lightning_internals import end_with_exit_code_of_ranks, quiet_and_interruptible
from protlm.training.loggers import COLUMNS, make_loggers
from protlm.training.module import LanguageModeling, Training
from protlm.training.run_plan import RunPlan


@dataclass(frozen=True)
class Run:
    """A run: its folder and settings, and what its kind of training adds to the loop.

    The callbacks run before those that stop and save; `micro_batches` are those of a batch.
    """

    folder: Path
    config: TrainerConfig
    checkpoint: Path | None
    lock: FolderLock | None
    callbacks: list[Callback]
    loggers: list[Logger]
    environment: list[ClusterEnvironment]
    profiler: Profiler | None = None
    micro_batches: int = 1

    def lacks_validation(self, step: int, *, of_start: bool) -> bool:
        """Returns whether the validation after this step is due but not in the log."""
        config = self.config
        is_due = step % config.valid_every == 0 or step >= config.max_steps
        return (of_start or step > 0) and is_due and not is_validated(self.folder, step)


def last_step(checkpoint: Path | None) -> int:
    """Returns the step of a checkpoint, or 0 without one."""
    return 0 if checkpoint is None else step_of(checkpoint)


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Returns the newest checkpoint that is whole, or None; warns of later ones."""
    checkpoint, faults = newest_whole(run_dir)
    if is_first_rank():
        for fault in faults:
            warnings.warn(f"{fault}; resuming from {checkpoint}", stacklevel=2)
    return checkpoint


def find_checkpoint(module: LanguageModeling, data: SequenceData, plan: RunPlan) -> Path | None:
    """Returns the checkpoint that a run continues from, complete or not; None if it has none."""
    run_dir, max_steps = plan.run_dir, plan.trainer.max_steps
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is not None:
        if (step := step_of(checkpoint)) > max_steps:
            raise UserError(
                f"{run_dir} is at step {step}, after trainer.max_steps={max_steps}; type "
                f"trainer.max_steps={step} or more"
            )
        contents = read_facts(checkpoint)
        module.check_continues(contents)
        # A checkpoint that lacks the position is rejected when it is loaded.
        if place := contents.get(type(data).__qualname__):
            data.check_continues(place)
    return checkpoint


def train(
    module: LanguageModeling,
    data: SequenceData,
    plan: RunPlan,
    *,
    checkpoint: Path | None,
    measurement: MeasureModel | None = None,
    lock: FolderLock | None = None,
) -> tuple[int, ExitCode]:
    """Trains until `trainer.max_steps` or until a signal, and saves a final checkpoint.

    It continues from the checkpoint of `find_checkpoint`. Before each checkpoint the first rank
    checks its lock. Returns the last step, and the exit code.
    """
    run_dir, config, data_wait = plan.run_dir, plan.trainer, DataWait()
    callbacks = _callbacks(module, data, plan, data_wait, measurement)
    more = [name for one in callbacks if isinstance(one, LoopCallback) for name in one.columns]
    run = Run(
        run_dir,
        config,
        checkpoint,
        lock,
        callbacks,
        make_loggers(
            plan.config.logger,
            run_dir,
            [*COLUMNS, *more],
            from_step=last_step(checkpoint),
            settings={**to_plain(plan.config), "data_fingerprint": data.train.fingerprint},
        ),
        cluster_environment(),
        data_wait,
        plan.share.micro_batches,
    )
    with (
        lost_ranks_explained(config),
        loader_errors_explained(
            data.config.num_workers, lambda: data.train.size_fault() or data.valid.size_fault()
        ),
    ):
        return fit(module, data, run)


def _callbacks(
    module: LanguageModeling,
    data: SequenceData,
    plan: RunPlan,
    data_wait: DataWait,
    measurement: MeasureModel | None,
) -> list[Callback]:
    config, run_dir = plan.trainer, plan.run_dir
    estimates = WatchEstimates(module.network, every=config.log_every)
    callbacks = [
        TrackDataProgress(),
        RedrawFeatures(keeps=plan.config.optimizer.only_relatives),
        *([] if config.ema_decay is None else [AverageWeights(config.ema_decay)]),
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
        WriteHistory(run_dir),
    ]
    if measurement is not None:
        callbacks.append(measurement)
    if config.compile:
        compile_model(module.network)
        callbacks.append(RunEagerly(config.log_every if estimates.columns else None))
    return callbacks


def fit(module: Training, data: pl.LightningDataModule, run: Run) -> tuple[int, ExitCode]:
    """Trains, from a checkpoint or from the start, until `max_steps`, a callback or a signal.

    The order of the callbacks is that in which they see a step; Lightning itself moves
    `SaveCheckpoints`, a checkpoint callback, behind the others. `CheckSameStep` is first, because
    ranks that start at different steps must not train at all. The callbacks of the run track and
    log the step. `ValidateLastStep` asks for a validation after the last step, which
    `StopOnSignal`, after it, cancels when the ranks agree to stop. `SaveCheckpoints` has to come
    after `StopOnSignal`: it saves the step after which the run stops, and saves the position in the
    data and the counters, which the others have updated by then.
    """
    config, step = run.config, last_step(run.checkpoint)
    lacks_validation = run.lacks_validation(step, of_start=module.keeps_start)
    if step >= config.max_steps and not lacks_validation:
        return step, ExitCode.OK
    # Hides Lightning's notices about devices and its products.
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    stop = StopOnSignal()
    callbacks = [
        CheckSameStep(),
        *run.callbacks,
        StallWatchdog(timeout_minutes=config.timeout_minutes),
        ValidateLastStep(config.max_steps),
        stop,
        SaveCheckpoints(
            run.folder,
            config,
            from_step=step,
            lock=run.lock,
            keeps_start=module.keeps_start and run.checkpoint is None,
        ),
    ]
    if lacks_validation:
        callbacks.append(ResumeValidation(config.max_steps))
    trainer = _trainer(module, run, callbacks)
    end_with_exit_code_of_ranks()
    with quiet_and_interruptible():
        trainer.fit(module, data, ckpt_path=run.checkpoint, weights_only=True)
    step = trainer.global_step
    is_cut_off = trainer.should_stop and run.lacks_validation(step, of_start=module.keeps_start)
    is_complete = not is_cut_off and (step >= config.max_steps or not stop.received)
    return step, ExitCode.OK if is_complete else stop.exit_code


def _trainer(module: Training, run: Run, callbacks: list[Callback]) -> pl.Trainer:
    config = run.config
    accelerator, _, index = config.accelerator.partition(":")
    batches_per_step = config.accumulate_grad_batches * run.micro_batches
    return pl.Trainer(
        default_root_dir=run.folder,
        accelerator=accelerator,
        devices=[int(index)] if index else config.devices,
        num_nodes=config.num_nodes,
        strategy=strategy(config, uses_all_parameters=module.uses_all_parameters),
        precision=config.precision,  # pyright: ignore[reportArgumentType]
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
        logger=run.loggers,
        plugins=[VerifiedCheckpointIO(), *run.environment],
        callbacks=callbacks,
        profiler=run.profiler,
    )
