"""The folder of `protlm finetune`: one process at a time, and the same settings when it resumes."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from protlm import __version__
from protlm.downstream.splits import Split
from protlm.downstream.tasks import Targets
from protlm.errors import InputDataError, OutputError, UserError
from protlm.lock import FolderLock
from protlm.paths import complete_file

MERGED, SETTINGS = "model", "finetune.json"
# How the settings are typed, where that is not --NAME.
_TYPED = {
    "labels": "file of labels",
    "label_values": "content of the labels (--label, --task, --min-count)",
    "split": "split (--cluster-table, --cluster, --seed)",
    "sequences": "content of the sequences (--sequences)",
    "rank": "--lora",
    "targets": "--lora-targets",
    "tokens_per_batch": "--toks-per-batch",
    "protlm": "version of protlm",
    "torch": "version of torch",
}


@final
class FinetuneLock(FolderLock):
    """The lock of the folder of a fine-tuning."""

    doing = "being trained"
    if_running = "wait for it, or choose another --output"
    if_gone = "remove {lock} and type the same command again"


def refuse_complete(output: Path) -> None:
    """Makes sure that a run is not complete."""
    # Unlike that of Path, this is false in a folder that cannot be read.
    if os.path.exists(output / MERGED):  # noqa: PTH110
        raise OutputError(f"{output} is complete: remove it or choose another name")


def fingerprint(sequences: Sequence[str], targets: Targets, split: Split) -> dict[str, str]:
    """Returns hashes of what is trained on, and the versions that decide the result."""
    return {
        "label_values": _digest([targets.task, *targets.classes], targets.values),
        "split": _digest([], split.train, split.valid, split.test, split.groups),
        "sequences": _digest(sequences),
        "protlm": __version__,
        "torch": torch.__version__,
    }


def _digest(names: Sequence[str], *arrays: np.ndarray) -> str:
    digest = hashlib.sha256(json.dumps(list(names)).encode())
    for one in arrays:
        digest.update(f"{one.dtype} {one.shape}".encode())
        digest.update(np.ascontiguousarray(one).tobytes())
    return digest.hexdigest()


def check_same_run(output: Path, settings: dict[str, Any]) -> None:
    """Writes the settings of a new run, or compares them with those of the run to continue."""
    refuse_complete(output)
    content = json.loads(json.dumps(settings))
    path = output / SETTINGS
    if not path.exists():
        with complete_file(path) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")
        return
    try:
        before: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputDataError(f"{path} is damaged: remove {output} and train again") from error
    for key, value in content.items():
        if before.get(key) != value:
            typed = _TYPED.get(key, f"--{key.replace('_', '-')}")
            raise UserError(
                f"{output} is a run with another {typed}: {before.get(key)}, not {value}; choose "
                "another folder, or type the settings of that run"
            )
