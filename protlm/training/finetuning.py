"""The run of a fine-tuning: the loop of every training, with epochs, and the best weights kept."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.plugins.environments import LightningEnvironment  # pyright: ignore[reportPrivateImportUsage]

from protlm.checkpoints.checks import check_sum
from protlm.checkpoints.format import CHECKPOINTS, checkpoint_name, load_training, read_facts
from protlm.checkpoints.validations import METRICS, best_checkpoints, read_metrics
from protlm.config import BestMetric, OnSaveError, TrainerConfig
from protlm.options.labels import FinetuneSettings
from protlm.system.errors import (
    ExitCode,
    InputDataError,
    OutputError,
    TrainingDivergedError,
    UserError,
)
from protlm.system.lock import FolderLock
from protlm.system.paths import complete_file
from protlm.system.terminal import JobProgress
from protlm.training.callbacks.hooks import LoopCallback, log
from protlm.training.labels import LabeledData, LabelLearning
from protlm.training.launch import (
    ACCELERATORS,
    is_first_rank,
    leave_other_ranks,
    require_devices,
)
from protlm.training.loggers import CsvFile
from protlm.training.module import Training
from protlm.training.run import Run, fit, last_step, newest_checkpoint


def valid_losses(folder: Path, *, until: int) -> list[float]:
    """Returns the validation losses of the start and of the epochs, until a step."""
    return [row["valid_loss"] for row in read_metrics(folder / METRICS) if row["step"] <= until]


def stale_epochs(losses: Sequence[float]) -> int:
    """Returns the number of epochs since the one with the lowest loss.

    >>> stale_epochs([3.0, 1.0, 2.0, 1.0])
    2
    """
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def restore_log(folder: Path, checkpoint: Path | None) -> None:
    """Makes the log what a verified checkpoint has, since the best epoch is chosen by it."""
    log: str | None = ""
    if checkpoint is not None:
        found = read_facts(checkpoint)
        log = found.get("callbacks", {}).get(ReportEpochs.__qualname__, {}).get(METRICS)
        if log is None or found.get("global_step") != last_step(checkpoint):
            raise InputDataError(
                f"{checkpoint} is not of the step in its name, or of another version: remove "
                f"{folder} to begin again"
            )
    with complete_file(folder / METRICS, overwrite=True) as temporary:
        temporary.write_bytes(log.encode())


def check_best(folder: Path, steps_per_epoch: int, *, until: int) -> None:
    """Refuses a run without the weights of the best epoch."""
    if losses := valid_losses(folder, until=until):
        best = losses.index(min(losses))
        try:
            check_sum(folder / CHECKPOINTS / checkpoint_name(best * steps_per_epoch))
        except InputDataError as error:
            raise InputDataError(
                f"{error}, and it has the weights of epoch {best}, the best until now; remove "
                f"{folder} to begin again"
            ) from error


class ReportEpochs(LoopCallback):
    """Logs and prints the start and each epoch, and ends the run by its patience."""

    def __init__(self, data: LabeledData, settings: FinetuneSettings, file: CsvFile) -> None:
        self._folder, self._settings, self._file = file.path.parent, settings, file
        self._steps, self._validation = data.steps_per_epoch, data.batches_per_validation
        self._progress: JobProgress | None = None
        self._done = 0
        self._losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Returns the log until now, which a checkpoint keeps."""
        path = self._file.path
        return {METRICS: path.read_bytes().decode() if path.exists() else ""}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._losses = valid_losses(self._folder, until=trainer.global_step)
        self._refuse_divergence()
        self._done = trainer.global_step + len(self._losses) * self._validation

    def on_step_end(self, trainer: Trainer, module: Training, batch: Any) -> None:
        if module.is_skipped:
            raise TrainingDivergedError(
                f"the loss of step {trainer.global_step}, or its gradient, is not finite; "
                f"{self._advice()}"
            )
        self._count(trainer)

    def on_validated_batch(self, trainer: Trainer, number: int) -> None:
        self._count(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.should_stop:
            # A signal cut it off; the resumed run repeats it.
            return
        assert isinstance(pl_module, LabelLearning)
        train = pl_module.train_loss()
        valid, score = pl_module.valid_scores()
        epoch, metric = len(self._losses), pl_module.metric.name
        row = {"epoch": epoch, "valid_loss": valid, f"valid_{metric}": score}
        log(trainer, row | ({"train_loss": train} if epoch else {}))
        # The best epoch is read from the rows.
        if failure := trainer.strategy.broadcast(self._file.failure):
            raise OutputError(f"{failure}; the same command continues the run")
        kept = ", the lowest so far" if epoch and valid < min(self._losses) else ""
        self._losses.append(valid)
        self._refuse_divergence()
        at_most = f"epoch {epoch} of {self._settings.epochs} at most: training loss {train:.4f}, "
        where = at_most if epoch else "epoch 0, before training: "
        assert self._progress is not None
        self._progress.print(f"{where}validation {metric} {score:.3f}, loss {valid:.4f}{kept}")
        trainer.should_stop = stale_epochs(self._losses) >= self._settings.patience

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_validated = (len(self._losses) - 1) * self._steps == trainer.global_step > 0
        if self._progress is not None and is_validated and min(self._losses) == self._losses[0]:
            self._progress.print(
                "no epoch has a lower validation loss than the start, which is the result: the "
                "model is unchanged; a smaller learning rate may be better"
            )
        self._end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._end(exception)

    def _advice(self) -> str:
        return f"remove {self._folder} and choose a smaller learning rate"

    def _refuse_divergence(self) -> None:
        if self._losses and not math.isfinite(loss := self._losses[-1]):
            epoch, advice = len(self._losses) - 1, self._advice()
            if not epoch:
                advice = "the model or the labels of `valid` have values that are not finite"
            raise TrainingDivergedError(f"the validation loss of epoch {epoch} is {loss}; {advice}")

    def _count(self, trainer: Trainer) -> None:
        self._done += 1
        if self._progress is None:
            # Begins after the first batch, which is slower, so that the time left is right.
            total = self._validation + self._settings.epochs * (self._steps + self._validation)
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


def check_devices(settings: FinetuneSettings) -> None:
    """Makes sure that the devices exist, and that each gets a protein of a batch."""
    if settings.device.partition(":")[0] not in ACCELERATORS:
        raise UserError(
            f"the device {settings.device}: fine-tuning needs float64, which it lacks",
            {"device": "cpu"},
        )
    asked = f"devices={settings.devices}"
    require_devices(asked, settings.devices, is_gpu=settings.device.startswith("cuda"))
    if settings.devices > settings.batch_size:
        raise UserError(
            f"{asked} divide the batch of {settings.batch_size}; give as many proteins or more",
            {"batch_size": settings.devices},
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
    if is_first_rank():
        restore_log(folder, checkpoint)
    check_best(folder, data.steps_per_epoch, until=step)
    if checkpoint is None or stale_epochs(valid_losses(folder, until=step)) < settings.patience:
        file = CsvFile(
            folder,
            ("epoch", "train_loss", "valid_loss", f"valid_{module.metric.name}"),
            from_step=step,
            warns=False,
        )
        run = Run(
            folder,
            _config(settings, data.steps_per_epoch),
            checkpoint,
            lock,
            [ReportEpochs(data, settings, file)],
            [file],
            # Also in a job of SLURM, whose tasks would otherwise be taken for the ranks.
            [LightningEnvironment()],
        )
        device = next(module.parameters()).device
        _, code = fit(module.train(), data, run)
        leave_other_ranks()
        # Lightning leaves the weights on the CPU.
        module.to(device)
        if code:
            return code
    (best,) = best_checkpoints(folder, BestMetric.valid_loss, 1)
    module.load_state_dict(load_training(best)["state_dict"])
    return ExitCode.OK


def _config(settings: FinetuneSettings, steps_per_epoch: int) -> TrainerConfig:
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
