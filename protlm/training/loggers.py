"""Loggers of metrics: always a CSV file; TensorBoard and Weights & Biases on request.

A logger that fails is switched off with one warning and never stops training.
"""

import csv
import hashlib
import os
import secrets
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from protlm.checkpoints.validations import METRICS, whole_rows
from protlm.config import LoggerConfig, WandbMode
from protlm.system.errors import OutputError
from protlm.system.paths import complete_file, explain_os_error

WANDB_ID = "wandb_id"

COLUMNS: tuple[str, ...] = (
    "epoch",
    "samples",
    "seconds",
    "train_loss",
    "train_accuracy",
    "valid_loss",
    "valid_accuracy",
    "valid_perplexity",
    "valid_unigram_loss",
    "valid_end_loss",
    "learning_rate",
    "gradient_norm",
    "samples_per_second",
    "residues_per_second",
    "residues_per_second_per_device",
    "model_flops_utilization",
    "data_wait_fraction",
    "memory_gib",
    "padding_fraction",
)


class _RunLogger(Logger):
    """A logger of a run, which has one log; hyperparameters are in `config.yaml`."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label

    @property
    def name(self) -> str:
        return self._label

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None: ...


class CsvFile(_RunLogger):
    """Appends rows to `metrics.csv`; a resumed run first removes those after `from_step`.

    A failure is a warning; a run that needs all rows reads `failure` instead.
    """

    def __init__(
        self, run_dir: Path, columns: Sequence[str] = COLUMNS, *, from_step: int, warns: bool = True
    ) -> None:
        super().__init__("csv")
        self.path = run_dir / METRICS
        self.failure: str | None = None
        self._columns = ("step", *columns)
        self._from_step = from_step
        self._warns = warns
        self._started = False

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        try:
            if not self._started:
                self._start()
            self._append({"step": step, **metrics})
        except (OSError, OutputError) as error:
            if self._warns and self.failure is None:
                warnings.warn(f"{self.path} cannot be written: {error}", stacklevel=2)
            known = explain_os_error(error, self.path) if isinstance(error, OSError) else error
            self.failure = str(known)

    @rank_zero_only
    def save(self) -> None:
        """Syncs the rows to disk, so that the log is at least as long as the checkpoint."""
        with suppress(OSError), self.path.open("rb") as file:
            os.fsync(file.fileno())

    def _append(self, row: dict[str, Any]) -> None:
        """Appends a whole row, or nothing."""
        size = self.path.stat().st_size
        try:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)
        except OSError:
            with suppress(OSError):
                os.truncate(self.path, size)
            raise

    def _start(self) -> None:
        rows = [row for row in whole_rows(self.path) if int(row["step"]) <= self._from_step]
        with (
            complete_file(self.path, overwrite=True) as temporary,
            temporary.open("w", newline="") as file,
        ):
            # A run that is continued may have fewer measurements.
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        self._started = True


class Guarded(_RunLogger):
    """Wraps a logger that may fail: the first failure switches it off with one warning."""

    def __init__(
        self, label: str, make: Callable[[], Logger], settings: Mapping[str, object]
    ) -> None:
        super().__init__(label)
        self._make, self._settings = make, settings
        self._inner: Logger | None = None
        self._off = False

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._try(lambda logger: logger.log_metrics(metrics, step))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._inner is not None:
            self._try(lambda logger: logger.finalize(status))

    def _try(self, action: Callable[[Logger], None]) -> None:
        if self._off:
            return
        try:
            if self._inner is None:
                self._inner = self._make()
                self._inner.log_hyperparams(dict(self._settings))
            action(self._inner)
        except Exception as error:
            self._off = True
            warnings.warn(f"logging to {self._label} failed and is off: {error}", stacklevel=2)


def make_loggers(
    config: LoggerConfig,
    run_dir: Path,
    columns: Sequence[str] = COLUMNS,
    *,
    from_step: int,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> list[Logger]:
    """Returns the loggers of a run; the CSV file is first, and the others record the settings."""
    loggers: list[Logger] = [CsvFile(run_dir, columns, from_step=from_step)]
    if config.tensorboard:
        loggers.append(Guarded("tensorboard", lambda: _tensorboard(run_dir, from_step), settings))
    if config.wandb is not WandbMode.off:
        loggers.append(Guarded("wandb", lambda: _wandb(config, run_dir), settings))
    return loggers


def _tensorboard(run_dir: Path, from_step: int) -> Logger:
    from pytorch_lightning.loggers import TensorBoardLogger

    # Hides what an earlier start wrote about steps that are repeated.
    return TensorBoardLogger(
        save_dir=run_dir, name="tensorboard", version="", purge_step=from_step + 1
    )


def _wandb(config: LoggerConfig, run_dir: Path) -> Logger:
    from pytorch_lightning.loggers import WandbLogger

    return WandbLogger(
        project=config.wandb_project,
        name=run_dir.name,
        save_dir=run_dir,
        id=_wandb_id(run_dir),
        offline=config.wandb is WandbMode.offline,
        resume="allow",
    )


def _wandb_id(run_dir: Path) -> str:
    """Returns the id of a run, which a copy of its folder does not share."""
    path, folder = run_dir / WANDB_ID, hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()
    there = path.read_text().split() if path.is_file() else []
    if there[1:] != [folder]:
        there = [secrets.token_hex(8), folder]
        with complete_file(path, overwrite=True) as temporary:
            temporary.write_text("\n".join(there) + "\n")
    return there[0]
