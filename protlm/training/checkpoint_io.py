"""How Lightning's checkpoints reach the disk: complete, durable and verifiable, or not at all."""

from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import CheckpointIO

from protlm.model.checkpoint import load_training, set_latest, sum_path, write_sum
from protlm.paths import complete_file


class VerifiedCheckpointIO(CheckpointIO):
    """Writes beside the target, syncs, writes the SHA-256, renames, and advances `latest` last."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Saves a checkpoint under its final name when it is durable, and makes it the latest."""
        target = Path(path)
        with complete_file(target, overwrite=True) as temporary:
            torch.save(checkpoint, temporary)
            write_sum(target, contents=temporary)
        set_latest(target)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint whose SHA-256 agrees; plain containers and tensors only."""
        return load_training(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint and its SHA-256."""
        target = Path(path)
        target.unlink(missing_ok=True)
        sum_path(target).unlink(missing_ok=True)
