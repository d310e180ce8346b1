"""Checkpoints: those of a run on disk, and what makes a model of one or of an exported folder.

Nothing is unpickled and nothing is used unless its SHA-256 agrees with the one written with it.
A checkpoint of a run is the file `checkpoints/step-NNNNNNNN.ckpt`, or a folder of that name where
each rank writes its own part; the file `latest` beside it names the one to go on from.
"""

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protlm.errors import InputDataError
from protlm.model.sums import check_sum, damaged_files, sum_path, write_sum, write_sums
from protlm.paths import complete_file, complete_folder

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
LATEST = "latest"
CHECKPOINTS = "checkpoints"
DESCRIPTION = "protlm"
# The average of the weights, where a run keeps one.
AVERAGE = "average"
NETWORK_PREFIX = "network."
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})\.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """A model as it was read: where from, its description (plain values), its weights."""

    path: Path
    description: dict[str, Any]
    weights: dict[str, Tensor]


def checkpoint_name(step: int) -> str:
    """The file name of the checkpoint taken after `step` optimiser steps."""
    return f"step-{step:08d}.ckpt"


def step_of(path: Path) -> int:
    """The optimiser step after which a checkpoint was taken, from its name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def all_checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first, whether whole or not."""
    found = (run_dir / CHECKPOINTS).glob("step-*.ckpt")
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=step_of)


def latest(run_dir: Path) -> Path | None:
    """The checkpoint that `latest` names, or None when a run has none yet.

    Raises:
        InputDataError: `latest` is damaged, or missing beside checkpoints.
    """
    pointer = run_dir / CHECKPOINTS / LATEST
    if not pointer.is_file():
        if all_checkpoints(run_dir):
            raise InputDataError(f"{pointer} is missing")
        return None
    name = pointer.read_bytes().decode(errors="replace").strip()
    if not _NAME.fullmatch(name):
        raise InputDataError(f"{pointer} is damaged: it names no checkpoint but {name!r:.60}")
    return pointer.with_name(name)


def set_latest(checkpoint: Path) -> None:
    """Makes `checkpoint` the newest of its run; call it when the checkpoint is durable."""
    with complete_file(checkpoint.with_name(LATEST), overwrite=True) as temporary:
        temporary.write_text(checkpoint.name + "\n")


def newest_whole(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from: the latest, or when that is damaged the newest whole one.

    Returns:
        The checkpoint, None when the run has none yet; and one sentence for each fault met before
        it was found.

    Raises:
        InputDataError: there are checkpoints, and all are damaged; nothing is removed.
    """
    candidates, faults = all_checkpoints(run_dir)[::-1], list[str]()
    try:
        first = latest(run_dir)
    except InputDataError as error:
        faults.append(str(error))
    else:
        if first is not None:
            candidates = [first, *(path for path in candidates if path != first)]
    for path in candidates:
        try:
            check_sum(path)
        except InputDataError as error:
            faults.append(str(error))
        else:
            return path, faults
    if faults:
        raise InputDataError(
            f"no checkpoint of {run_dir} is whole ({'; '.join(faults)}): put a copy of one back, "
            "or begin anew in another run_dir="
        )
    return None, []


def save_training(contents: dict[str, Any], path: Path) -> None:
    """Writes a training checkpoint and makes it the latest of its run.

    SHA-256, checkpoint and `latest` come in this order, each durable under its name before the
    next: whoever is killed in between leaves `latest` naming a whole checkpoint.

    Raises:
        OutputError: no space or no permission; what was there is as it was.
    """
    write_training(contents, path, overwrite=True)
    set_latest(path)


def write_training(contents: dict[str, Any], path: Path, *, overwrite: bool = False) -> None:
    """Writes a training checkpoint under its name, and its SHA-256 before that.

    Raises:
        OutputError: no space or no permission, or there is something of this name.
    """
    with complete_file(path, overwrite=overwrite) as temporary:
        save(contents, temporary)
        write_sum(path, contents=temporary)


def save(contents: dict[Any, Any], path: Path) -> None:
    """Writes plain containers and tensors to a file; a failure is the system's OSError."""
    with path.open("wb") as file:
        try:
            torch.save(contents, file)
        except RuntimeError as error:
            # torch says that it could not write; the system's reason is what it stumbled over.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def remove(path: Path) -> None:
    """Removes a checkpoint, and its SHA-256 after it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
        sum_path(path).unlink(missing_ok=True)


def sweep(run_dir: Path) -> None:
    """Removes the unfinished checkpoints that killed processes of a run have left."""
    for path in (run_dir / CHECKPOINTS).glob(".*.part"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def load_training(path: Path, *, device: str = "cpu") -> dict[str, Any]:
    """The whole of a training checkpoint: plain containers and tensors, verified first.

    Raises:
        InputDataError: there is none, it is damaged, or no checkpoint of ours.
    """
    if not path.exists():
        raise InputDataError(
            f"{path}: no such checkpoint; give a run folder, a .ckpt file or an exported folder"
        )
    if path.suffix != ".ckpt":
        raise InputDataError(
            f"{path} is no model; give a run folder, a .ckpt file or an exported folder"
        )
    if path.is_dir():
        raise InputDataError(
            f"{path} is in parts, one for each rank; type: protlm checkpoint consolidate {path} "
            "-o NAME.ckpt, and give what that makes"
        )
    check_sum(path)
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise InputDataError(f"{path} is no protlm checkpoint: {_first_line(error)}") from error


def read(path: Path) -> Checkpoint:
    """Reads a model from a run folder, a checkpoint file or an exported folder.

    Raises:
        InputDataError: there is none, or it is damaged; the message names the file.
    """
    if (path / CONFIG).is_file() or (path / WEIGHTS).is_file():
        return _read_exported(path)
    if path.is_dir() and path.suffix != ".ckpt":
        return _read_run(path)
    return _read_training(path)


def _read_run(run_dir: Path) -> Checkpoint:
    """The model of the latest checkpoint; where that is damaged, no other one is used unasked."""
    try:
        path = latest(run_dir)
        if path is not None:
            return _read_training(path)
    except InputDataError as error:
        whole, faults = newest_whole(run_dir)
        if not faults:
            raise
        raise InputDataError(
            f"{error}; the newest whole checkpoint is {whole}: to use that model, give it in "
            f"place of {run_dir}"
        ) from None
    raise InputDataError(
        f"{run_dir} holds no model: neither {CHECKPOINTS}/{LATEST} nor {CONFIG}; "
        "give a run folder, a .ckpt file or an exported folder"
    )


def _read_training(path: Path) -> Checkpoint:
    contents = load_training(path)
    description = contents.get(DESCRIPTION)
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise InputDataError(f"{path} was not written by protlm, or by a newer version of it")
    weights = {
        name.removeprefix(NETWORK_PREFIX): value
        for name, value in contents["state_dict"].items()
        if name.startswith(NETWORK_PREFIX)
    }
    # An average was validated and is what is used; it has no buffers.
    return Checkpoint(path, description, weights | contents.get(AVERAGE, {}))


def _read_exported(directory: Path) -> Checkpoint:
    from safetensors.torch import load_file

    for name in damaged_files(directory, required=(CONFIG, WEIGHTS)):
        raise InputDataError(f"{directory / name} is damaged or missing: export the model again")
    try:
        description = json.loads((directory / CONFIG).read_text())
        weights = load_file(directory / WEIGHTS)
    except Exception as error:
        raise InputDataError(f"{directory} holds no model: {_first_line(error)}") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise InputDataError(f"{directory / CONFIG} was not written by this version of protlm")
    return Checkpoint(directory, description, weights)


def export(checkpoint: Checkpoint, directory: Path) -> None:
    """Writes a model for use: `model.safetensors`, `config.json`, and their SHA-256 sums."""
    from safetensors.torch import save

    with complete_folder(directory) as folder:
        weights = {name: value.contiguous() for name, value in checkpoint.weights.items()}
        # `save_file` would let nobody but the owner read it.
        (folder / WEIGHTS).write_bytes(save(weights, metadata={"format": "pt"}))
        (folder / CONFIG).write_text(json.dumps(checkpoint.description, indent=2) + "\n")
        write_sums(folder)


def weights_hash(weights: dict[str, Tensor]) -> str:
    """SHA-256 of a model's weights: the same for a checkpoint and for what is exported from it."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:200]
