"""Writes and reads Lightning's checkpoints atomically, with a checksum."""

from pathlib import Path
from typing import Any

from pytorch_lightning.plugins.io import CheckpointIO

from protlm.checkpoints.format import load_training, remove, save_training
from protlm.system.errors import InputDataError, OutputError
from protlm.system.paths import explain_os_error

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


class VerifiedCheckpointIO(CheckpointIO):
    """Writes beside the target, syncs, writes the SHA-256, renames, and advances `latest` last.

    A failure to write raises no error here, because only rank 0 writes and the others wait for it.

    Attributes:
        failure: the reason why the last checkpoint could not be written, or None.
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
        self,
        path: Any,
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint whose SHA-256 matches; plain containers and tensors only."""
        contents = load_training(Path(path))
        for key, kind in _RESUMED.items():
            if not isinstance(contents.get(key), kind):
                raise InputDataError(
                    f"{path} is not a checkpoint that a run can continue from: its {key!r} is "
                    "missing or damaged; remove it to continue from the one before, or choose "
                    "another run_dir="
                )
        return contents

    def remove_checkpoint(self, path: Any) -> None:
        remove(Path(path))
