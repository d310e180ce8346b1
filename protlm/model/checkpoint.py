"""Reading and writing models: a run's newest checkpoint, one checkpoint, an exported folder.

Nothing is unpickled and nothing is used unless its SHA-256 agrees with the one written beside it,
in the format of `sha256sum`.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protlm.errors import InputDataError
from protlm.paths import complete_file, complete_folder, sha256_of

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
SUMS = "SHA256SUMS"
LATEST = "latest"
CHECKPOINTS = "checkpoints"
DESCRIPTION = "protlm"
NETWORK_PREFIX = "network."
FORMAT = 1
_NAME = re.compile(r"step-\d{8}\.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """A model as it was read: where from, its description (plain values), its weights."""

    path: Path
    description: dict[str, Any]
    weights: dict[str, Tensor]


def checkpoint_name(step: int) -> str:
    """The file name of the checkpoint taken after `step` optimiser steps."""
    return f"step-{step:08d}.ckpt"


def sum_path(path: Path) -> Path:
    """Where the SHA-256 of a checkpoint stands."""
    return path.with_name(path.name + ".sha256")


def write_sum(path: Path, *, contents: Path) -> None:
    """Writes beside `path` the SHA-256 that `contents` has, in the format of `sha256sum`."""
    with complete_file(sum_path(path), overwrite=True) as temporary:
        temporary.write_text(f"{sha256_of(contents)}  {path.name}\n")


def check_sum(path: Path) -> None:
    """Refuses a checkpoint whose SHA-256 is missing or does not agree.

    Raises:
        InputDataError: names the file.
    """
    try:
        expected = sum_path(path).read_text().split()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        raise InputDataError(
            f"{path} has no readable {sum_path(path).name} beside it, so it may be incomplete; "
            "use another checkpoint of the run"
        ) from None
    if sha256_of(path) != expected:
        raise InputDataError(
            f"{path} is damaged: its SHA-256 is not the one in {sum_path(path).name}; to use "
            f"another one of the run, write its name into {path.with_name(LATEST)}"
        )


def latest(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run, or None when it has none yet."""
    pointer = run_dir / CHECKPOINTS / LATEST
    if not pointer.is_file():
        return None
    name = pointer.read_bytes().decode(errors="replace").strip()
    if not _NAME.fullmatch(name):
        raise InputDataError(
            f"{pointer} names no checkpoint: {name!r:.60}; write one's name into it"
        )
    return pointer.with_name(name)


def set_latest(checkpoint: Path) -> None:
    """Makes `checkpoint` the newest of its run; call it when the file is durable."""
    with complete_file(checkpoint.with_name(LATEST), overwrite=True) as temporary:
        temporary.write_text(checkpoint.name + "\n")


def read(path: Path) -> Checkpoint:
    """Reads a model from a run folder, a checkpoint file or an exported folder.

    Raises:
        InputDataError: there is none, or it is damaged; the message names the file.
    """
    if (path / CONFIG).is_file() or (path / WEIGHTS).is_file():
        return _read_exported(path)
    if path.is_dir():
        newest = latest(path)
        if newest is None:
            raise InputDataError(
                f"{path} holds no model: neither {CHECKPOINTS}/{LATEST} nor {CONFIG}; "
                "give a run folder, a .ckpt file or an exported folder"
            )
        return _read_training(newest)
    return _read_training(path)


def load_training(path: Path, *, device: str = "cpu") -> dict[str, Any]:
    """The whole of a training checkpoint: plain containers and tensors, verified first."""
    if not path.is_file():
        raise InputDataError(
            f"{path}: no such checkpoint; give a run folder, a .ckpt file or an exported folder"
        )
    if path.suffix != ".ckpt":
        raise InputDataError(
            f"{path} is no model; give a run folder, a .ckpt file or an exported folder"
        )
    check_sum(path)
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise InputDataError(f"{path} is no protlm checkpoint: {_first_line(error)}") from error


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
    return Checkpoint(path, description, weights)


def _read_exported(directory: Path) -> Checkpoint:
    from safetensors.torch import load_file

    for name in check_folder(directory):
        raise InputDataError(f"{directory / name} is damaged or missing: export the model again")
    try:
        description = json.loads((directory / CONFIG).read_text())
        weights = load_file(directory / WEIGHTS)
    except Exception as error:
        raise InputDataError(f"{directory} holds no model: {_first_line(error)}") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise InputDataError(f"{directory / CONFIG} was not written by this version of protlm")
    return Checkpoint(directory, description, weights)


def check_folder(directory: Path) -> list[str]:
    """Names of the files of an exported folder that do not agree with its SHA256SUMS."""
    try:
        lines = (directory / SUMS).read_text().splitlines()
        sums = {name: digest for digest, name in (line.split() for line in lines)}
    except (OSError, ValueError):
        return [SUMS]
    wanted = (CONFIG, WEIGHTS)
    return [
        name
        for name in wanted
        if not (directory / name).is_file() or sha256_of(directory / name) != sums.get(name)
    ]


def export(checkpoint: Checkpoint, directory: Path) -> None:
    """Writes a model for use: `model.safetensors`, `config.json`, and their SHA-256 sums."""
    from safetensors.torch import save

    with complete_folder(directory) as folder:
        weights = {name: value.contiguous() for name, value in checkpoint.weights.items()}
        # `save_file` would let nobody but the owner read it.
        (folder / WEIGHTS).write_bytes(save(weights, metadata={"format": "pt"}))
        (folder / CONFIG).write_text(json.dumps(checkpoint.description, indent=2) + "\n")
        sums = [f"{sha256_of(folder / name)}  {name}\n" for name in (CONFIG, WEIGHTS)]
        (folder / SUMS).write_text("".join(sums))


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
