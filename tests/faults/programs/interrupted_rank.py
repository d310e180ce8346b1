"""Runs that are killed after a step, or that have no space for a checkpoint.

Each rank writes the samples of its batches to `samples-RUN-RANK.jsonl`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protlm.checkpoints import format as checkpoints
from protlm.system.errors import OutputError
from protlm.training.callbacks.save_checkpoints import SaveCheckpoints
from protlm.training.module import LanguageModeling
from tests.faults.programs.rank import RANK, train


class Killed(BaseException):
    """Represents a kill: nothing that follows is done."""


original_step = LanguageModeling.training_step
original_end = SaveCheckpoints.on_train_batch_end
original_save = checkpoints.save
name = ""
killed_at: int | None = None
full_at: int | None = None


def training_step(self: LanguageModeling, batch: Any, batch_index: int) -> Any:
    """Notes the samples of a batch."""
    with Path(f"samples-{name}-{RANK}.jsonl").open("a") as file:
        print(json.dumps([batch.after, batch.samples_B.tolist()]), file=file)
    return original_step(self, batch, batch_index)


def on_train_batch_end(
    self: SaveCheckpoints,
    trainer: Any,
    pl_module: Any,
    outputs: Any,
    batch: Any,
    batch_idx: int,
) -> None:
    """Ends the run after a step and its checkpoint."""
    original_end(self, trainer, pl_module, outputs, batch, batch_idx)
    if trainer.global_step == killed_at:
        raise Killed


def save(contents: dict[Any, Any], path: Path) -> None:
    """Saves a checkpoint, unless the disk is full at this step."""
    if contents["global_step"] == full_at:
        path.write_bytes(b"a part of it")
        raise OSError(28, "No space left on device")
    original_save(contents, path)


LanguageModeling.training_step = training_step
SaveCheckpoints.on_train_batch_end = on_train_batch_end
checkpoints.save = save


def start(
    run: str, settings: Sequence[str], *, killed: int | None = None, full: int | None = None
) -> Any:
    """Trains, and returns how the run ended: None if it was killed."""
    global name, killed_at, full_at
    name, killed_at, full_at = run, killed, full
    try:
        return train(run, *settings)
    except Killed:
        return None
    except OutputError as error:
        return str(error), int(error.exit_code)
