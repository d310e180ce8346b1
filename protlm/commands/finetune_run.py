"""The folder of `protlm finetune`: one process at a time, and the same settings when it resumes."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protlm import __version__
from protlm.downstream.splits import Split
from protlm.downstream.tasks import Targets
from protlm.system.errors import OutputError
from protlm.system.lock import FolderLock
from protlm.system.work_folder import Kind, work_folder
from protlm.training.launch import is_first_rank

MERGED = "model"
_FINETUNING = Kind("fine-tuning", "being trained", "--output")


def refuse_complete(output: Path) -> None:
    """Makes sure that a run is not complete."""
    # Unlike that of Path, this is false in a folder that cannot be read.
    if os.path.exists(output / MERGED):  # noqa: PTH110
        raise OutputError(f"{output} is complete: remove it or choose another name")


@contextmanager
def run_folder(
    output: Path, begun_with: Mapping[str, Any], *, break_lock: bool
) -> Iterator[FolderLock | None]:
    """Yields the lock of the folder of a new run or of the same one; None on other ranks."""
    if not is_first_rank():
        yield None
        return
    with work_folder(output, begun_with, _FINETUNING, break_lock=break_lock) as work:
        # The command says itself how to continue.
        work.is_quiet = True
        refuse_complete(output)
        yield work.lock


def fingerprint(sequences: Sequence[str], targets: Targets, split: Split) -> dict[str, str]:
    """Returns hashes of what is trained on, and the versions that decide the result."""
    labels = _digest([targets.task, *targets.classes], targets.values)
    groups = _digest([], split.train, split.valid, split.test, split.groups)
    return {
        "the values of the labels (--label, --task, --min-count)": labels,
        "the split (--cluster-table, --cluster, --seed)": groups,
        "the sequences (--sequences)": _digest(sequences),
        "protlm": __version__,
        "torch": torch.__version__,
    }


def _digest(names: Sequence[str], *arrays: np.ndarray) -> str:
    digest = hashlib.sha256(json.dumps(list(names)).encode())
    for one in arrays:
        digest.update(f"{one.dtype} {one.shape}".encode())
        digest.update(np.ascontiguousarray(one).tobytes())
    return digest.hexdigest()
