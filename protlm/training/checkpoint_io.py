"""How Lightning's checkpoints reach the disk: complete, durable and verifiable, or not at all."""

from pathlib import Path
from typing import Any

from pytorch_lightning.plugins.io import CheckpointIO

from protlm.errors import OutputError
from protlm.model.checkpoint import load_training, remove, save_training
from protlm.paths import explain_os_error


class VerifiedCheckpointIO(CheckpointIO):
    """Writes beside the target, syncs, writes the SHA-256, renames, and advances `latest` last.

    A checkpoint that cannot be written raises nothing here, where only the first rank writes and
    the others wait for it: `failure` says why the last one was not, or is None.
    """

    def __init__(self) -> None:
        self.failure: str | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Saves a checkpoint under its final name when it is durable, and makes it the latest."""
        self.failure = None
        try:
            save_training(checkpoint, Path(path))
        except OutputError as error:
            self.failure = str(error)
        except OSError as error:
            self.failure = str(explain_os_error(error, Path(path)))

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
        remove(Path(path))
