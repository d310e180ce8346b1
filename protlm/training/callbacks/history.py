"""`history.tsv` of a run: every start and checkpoint, with the hash of the weights.

It shows that a resumed run began with the saved weights: the row of a start has the same hash as
the row of the checkpoint that it resumed from. Without averaged weights and adapters, `checkpoint
info` prints the same one.
"""

import os
import platform
import warnings
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from protlm.checkpoints.format import weights_hash

HISTORY = "history.tsv"
COLUMNS = ("time", "event", "step", "weights_sha256", "host", "threads", "torch")


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
