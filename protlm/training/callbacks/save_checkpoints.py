"""Saves checkpoints with a checksum, removes old ones, and keeps a history of the weights.

Each start and checkpoint has a row in `history.tsv` with the hash of the weights, so that it shows
that a resumed run began with the saved weights. Without averaged weights and adapters, `checkpoint
info` prints the same hash.
"""

import os
import platform
import time
import warnings
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.plugins.io import CheckpointIO

from protlm.checkpoints.format import (
    CHECKPOINTS,
    all_checkpoints,
    checkpoint_name,
    load_training,
    remove,
    save_training,
    step_of,
    sweep,
    weights_hash,
)
from protlm.checkpoints.validations import best_checkpoints
from protlm.config import OnSaveError, TrainerConfig
from protlm.system.errors import InputDataError, OutputError
from protlm.system.lock import FolderLock
from protlm.system.paths import explain_os_error
from protlm.training.callbacks.hooks import LoopCallback
from protlm.training.lightning_internals import drop_validation_counters
from protlm.training.module import Training

# The keys of a checkpoint that Lightning reads without a check, and their types.
_RESUMED = {
    "state_dict": dict,
    "global_step": int,
    "epoch": int,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
}
HISTORY = "history.tsv"
COLUMNS = ("time", "event", "step", "weights_sha256", "host", "threads", "torch")


class VerifiedCheckpointIO(CheckpointIO):
    """Writes beside the target, syncs, writes the SHA-256, renames, and advances `latest` last.

    A failure to write raises no error here, because only rank 0 writes and the others wait for it.
    """

    def __init__(self) -> None:
        self.failure: str | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        self.failure = None
        try:
            save_training(checkpoint, Path(path))
        except OutputError as error:
            self.failure = str(error)
        except OSError as error:
            self.failure = str(explain_os_error(error, Path(path)))

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint whose SHA-256 matches; plain containers and tensors only."""
        contents = load_training(Path(path))
        for key, kind in _RESUMED.items():
            if not isinstance(contents.get(key), kind):
                raise InputDataError(
                    f"{path} is not a checkpoint that a run can continue from: its {key!r} is "
                    "missing or damaged; remove it to continue from the one before, or start "
                    "a new run in another folder"
                )
        return contents

    def remove_checkpoint(self, path: Any) -> None:
        remove(Path(path))


class WriteHistory(Callback):
    """Appends a row to `history.tsv` at each start of a run and at each checkpoint."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / HISTORY

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._append("start", trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._append("save", trainer, pl_module)

    def _append(self, event: str, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        row = (
            datetime.now(UTC).isoformat(timespec="seconds"),
            event,
            str(trainer.global_step),
            weights_hash(module.get_submodule("network").state_dict()),
            platform.node(),
            str(torch.get_num_threads()),
            torch.__version__,
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._mend()
            is_new = not self._path.exists()
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines("\t".join(line) + "\n" for line in [COLUMNS] * is_new + [row])
        except OSError as error:
            # A failed write to the log must not end the run.
            warnings.warn(f"{self._path} cannot be written: {error.strerror}", stacklevel=2)

    def _mend(self) -> None:
        """Terminates a row that was truncated by a full disk or a kill."""
        with suppress(FileNotFoundError), self._path.open("rb+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")


class SaveCheckpoints(LoopCallback, Checkpoint):
    """Saves checkpoints by step and by the clock, and keeps the newest and the best.

    The checkpoint of `from_step` exists. The first rank checks the lock before each one. If asked,
    the weights that the run starts from are saved as step 0.
    """

    def __init__(
        self,
        run_dir: Path,
        config: TrainerConfig,
        *,
        from_step: int,
        lock: FolderLock | None = None,
        keeps_start: bool = False,
    ) -> None:
        self._run_dir, self._config, self._lock = run_dir, config, lock
        self._saved = -1 if keeps_start else from_step
        self._save_time = time.monotonic()
        # Damaged checkpoints after the step that the run resumes from are neither counted nor
        # removed; they are replaced when the run reaches their step again.
        self._damaged = {p.name for p in all_checkpoints(run_dir) if step_of(p) > from_step}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            sweep(self._run_dir)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._saved < 0 and not trainer.should_stop:
            self._save(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Drops the counters of validation batches: an interrupted validation is repeated."""
        drop_validation_counters(checkpoint)

    def on_step_end(self, trainer: Trainer, module: Training, batch: Any) -> None:
        if self._is_due(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves after a signal."""
        if trainer.should_stop:
            self._save(trainer)

    def _is_due(self, trainer: Trainer) -> bool:
        """Returns whether to save after this step; the same on all ranks."""
        step, config = trainer.global_step, self._config
        is_last = trainer.should_stop or step >= config.max_steps
        is_candidate = config.keep_best > 0 and step % config.valid_every == 0
        is_due = is_last or is_candidate or step % config.checkpoint_every == 0
        return is_due or self._is_time(trainer)

    def _is_time(self, trainer: Trainer) -> bool:
        if self._config.checkpoint_minutes is None:
            return False
        late = time.monotonic() - self._save_time >= 60 * self._config.checkpoint_minutes
        mine = torch.tensor(
            int(late and trainer.is_global_zero), device=trainer.strategy.root_device
        )
        return bool(trainer.strategy.reduce(mine, reduce_op="max"))

    def _save(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if step == self._saved:
            return
        self._check_lock(trainer)
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
            self._damaged.discard(path.name)
            self._prune(trainer)
        else:
            self._report(failure, trainer)

    def _check_lock(self, trainer: Trainer) -> None:
        """Raises `OutputError` on all ranks if the lock was taken over or its folder went away."""
        failure = None
        try:
            if self._lock is not None:
                self._lock.check()
        except OutputError as error:
            failure = f"{error}; {self._last()}"
        if failure := trainer.strategy.broadcast(failure):
            raise OutputError(failure)

    def _last(self) -> str:
        return (
            f"the last checkpoint is step {self._saved}" if self._saved > 0 else "there is none yet"
        )

    def _report(self, failure: str, trainer: Trainer) -> None:
        failure = f"{failure}; {self._last()}"
        is_last = trainer.should_stop or trainer.global_step >= self._config.max_steps
        if is_last or self._config.on_save_error is OnSaveError.stop:
            raise OutputError(f"{failure}; the same command continues the run")
        if trainer.is_global_zero:
            warnings.warn(f"{failure}; training continues", stacklevel=2)

    def _prune(self, trainer: Trainer) -> None:
        """Removes old checkpoints, right after a newer one was saved.

        A run may continue from that one, and by its log, which lacks the validation that follows,
        another is the best.
        """
        if not trainer.is_global_zero:
            return
        config = self._config
        paths = [p for p in all_checkpoints(self._run_dir) if p.name not in self._damaged]
        kept = {
            *paths[-max(config.keep_checkpoints, 2) :],
            *best_checkpoints(self._run_dir, config.best_metric, config.keep_best),
        }
        for path in paths:
            if path not in kept:
                # A failed removal is tried again after the next checkpoint.
                with suppress(OSError):
                    remove(path)
