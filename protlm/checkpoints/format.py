"""Reading and writing of the checkpoints of a run, exported models and shipped models.

Nothing is unpickled, and nothing is used unless it matches its SHA-256. A checkpoint of a run is
the file `checkpoints/step-NNNNNNNN.ckpt`. The file `latest` beside it names the checkpoint to
resume from.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protlm.checkpoints.checks import (
    check_sum,
    check_weights,
    damaged_files,
    sum_path,
    write_sum,
    write_sums,
)
from protlm.checkpoints.description import ModelDescription
from protlm.system.errors import InputDataError, did_you_mean
from protlm.system.json_file import read_json, write_json
from protlm.system.paths import complete_file, complete_folder, shipped

DEFAULT = "hybrid-6m"
CARD = "README.md"
RESULTS = "results.json"
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
LATEST = "latest"
CHECKPOINTS = "checkpoints"
DESCRIPTION = "protlm"
# The key of the averaged weights, if a run has them.
AVERAGE = "average"
NETWORK_PREFIX = "network."
_NAME = re.compile(r"step-(\d{8,})\.ckpt")


def shipped_models() -> list[Path]:
    """Returns the folders of the shipped models, by name."""
    return sorted(path.parent for path in shipped("models").glob(f"*/{CARD}"))


def default_model() -> Path:
    """Returns the folder of the shipped model that commands use where none is named."""
    return shipped("models") / DEFAULT


def announced_default(option: str) -> Path:
    """Returns the default model, and prints on standard error that it is used.

    Args:
        option: what to type for another model.
    """
    folder = default_model()
    print(f"model: {folder.name}, shipped with protlm; {option} uses another", file=sys.stderr)
    return folder


def find_model(path: Path) -> Path:
    """Returns the folder of the shipped model of this name; otherwise, or if it exists, `path`.

    >>> find_model(Path("runs/mine"))
    PosixPath('runs/mine')
    """
    named = [folder for folder in shipped_models() if folder.name == str(path)]
    return named[0] if named and not path.exists() else path


@dataclass(frozen=True)
class Checkpoint:
    """A model as it was read: its file or folder, its description and its weights."""

    path: Path
    description: ModelDescription
    weights: dict[str, Tensor]


def checkpoint_name(step: int) -> str:
    """Returns the file name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}.ckpt"


def step_of(path: Path) -> int:
    """Returns the optimizer step of a checkpoint, from its name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def all_checkpoints(run_dir: Path) -> list[Path]:
    """Returns the checkpoints of a run, oldest first, including damaged ones."""
    found = (run_dir / CHECKPOINTS).glob("step-*.ckpt")
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=step_of)


def latest(run_dir: Path) -> Path | None:
    """Returns the checkpoint that `latest` names, or None if a run has none yet."""
    pointer = run_dir / CHECKPOINTS / LATEST
    if not pointer.is_file():
        if all_checkpoints(run_dir):
            raise InputDataError(f"{pointer} is missing")
        return None
    name = pointer.read_bytes().decode(errors="replace").strip()
    if not _NAME.fullmatch(name):
        raise InputDataError(f"{pointer} is damaged: {name!r:.60} is not the name of a checkpoint")
    return pointer.with_name(name)


def set_latest(checkpoint: Path) -> None:
    """Makes a complete checkpoint the latest of its run."""
    with complete_file(checkpoint.with_name(LATEST), overwrite=True) as temporary:
        temporary.write_text(checkpoint.name + "\n")


def newest_whole(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Returns the checkpoint to resume from, if any, and one sentence for each damaged file.

    The latest, or the newest undamaged one.
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
            f"all checkpoints of {run_dir} are damaged ({'; '.join(faults)}): restore a copy of "
            "one, or start a new run in another folder"
        )
    return None, []


def save_training(contents: dict[str, Any], path: Path) -> None:
    """Writes a training checkpoint and makes it the latest of its run.

    SHA-256, checkpoint and `latest` are written in this order, each synced before the next, so
    that `latest` names a complete checkpoint at any time.
    """
    with complete_file(path, overwrite=True) as temporary:
        save(contents, temporary)
        write_sum(path, contents=temporary)
    set_latest(path)


def save(contents: dict[Any, Any], path: Path) -> None:
    """Writes plain containers and tensors to a file; raises the system's OSError."""
    with path.open("wb") as file:
        try:
            torch.save(contents, file)
        except RuntimeError as error:
            # torch reports that it could not write; the reason is the context of its error.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def remove(path: Path) -> None:
    """Removes a checkpoint, then its SHA-256."""
    path.unlink(missing_ok=True)
    sum_path(path).unlink(missing_ok=True)


def sweep(run_dir: Path) -> None:
    """Removes unfinished checkpoints of killed processes."""
    for path in (run_dir / CHECKPOINTS).glob(".*.part"):
        path.unlink(missing_ok=True)


def load_training(path: Path) -> dict[str, Any]:
    """Verifies and loads a training checkpoint: plain containers and tensors."""
    if not path.exists():
        hint = did_you_mean(str(path), {folder.name: folder.name for folder in shipped_models()})
        raise InputDataError(
            f"{path}: no such model{hint}; give a run folder, a .ckpt file, "
            "an exported folder, the downloaded folder or file of another program's model, its "
            "name OWNER/MODEL on the Hugging Face Hub, or a name that protlm models lists"
        )
    if path.suffix != ".ckpt":
        raise InputDataError(
            f"{path} is not a model; give a run folder, a .ckpt file or an exported folder"
        )
    check_sum(path)
    return read_facts(path, mmap=False)


def read_facts(path: Path, *, mmap: bool = True) -> dict[str, Any]:
    """Reads a verified training checkpoint; its tensors are not read but memory-mapped."""
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        raise InputDataError(f"{path} is not a protlm checkpoint: {_first_line(error)}") from error
    if not isinstance(contents, dict):
        raise InputDataError(f"{path} is not a protlm checkpoint: it contains a {type(contents)}")
    return contents


def read(path: Path) -> Checkpoint:
    """Reads a model from a run folder, a checkpoint file, an exported folder or a shipped name."""
    try:
        path = find_model(path)
        is_exported = (path / CONFIG).is_file() or (path / WEIGHTS).is_file()
    except OSError as error:
        raise InputDataError(f"{path} cannot be read: {error.strerror}") from error
    if is_exported:
        return _read_exported(path)
    return _read_run(path) if path.is_dir() else _read_training(path)


def _read_run(run_dir: Path) -> Checkpoint:
    """Reads the latest checkpoint; an older one is never used without a request."""
    try:
        path = latest(run_dir)
        if path is not None:
            return _read_training(path)
    except InputDataError as error:
        whole, faults = newest_whole(run_dir)
        if not faults:
            raise
        raise InputDataError(
            f"{error}; the newest undamaged checkpoint is {whole}: to use that model, give it "
            f"instead of {run_dir}"
        ) from None
    raise InputDataError(
        f"{run_dir} is not a model: it has neither {CHECKPOINTS}/{LATEST} nor {CONFIG}; "
        "give a run folder, a .ckpt file or an exported folder"
    )


def _read_training(path: Path) -> Checkpoint:
    contents = load_training(path)
    description = ModelDescription.parse(path, contents.get(DESCRIPTION))
    weights = {
        name.removeprefix(NETWORK_PREFIX): value
        for name, value in check_weights(path, contents.get("state_dict")).items()
        if name.startswith(NETWORK_PREFIX)
    }
    if AVERAGE in contents:
        # The average is what was validated. It has no buffers.
        weights |= check_weights(path, contents[AVERAGE])
    return Checkpoint(path, description, weights)


def _read_exported(directory: Path) -> Checkpoint:
    from safetensors.torch import load_file

    for name in damaged_files(directory, required=(CONFIG, WEIGHTS)):
        raise InputDataError(f"{directory / name} is damaged or missing: export the model again")
    description = read_json(directory / CONFIG, "the description of a model")
    try:
        weights = load_file(directory / WEIGHTS)
    except Exception as error:
        raise InputDataError(f"{directory} is not a model: {_first_line(error)}") from error
    parsed = ModelDescription.parse(directory / CONFIG, description)
    return Checkpoint(directory, parsed, check_weights(directory, weights))


def export(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    rounded: Collection[str] = (),
    check: Callable[[], object] = lambda: None,
) -> None:
    """Writes a model to a new folder with checksums; `rounded` weights are stored in bfloat16."""
    from safetensors.torch import save

    with complete_folder(directory, check=check) as folder:
        weights = {
            name: (value.bfloat16() if name in rounded else value).contiguous()
            for name, value in checkpoint.weights.items()
        }
        # `save_file` would make the file readable by its owner only.
        (folder / WEIGHTS).write_bytes(save(weights, metadata={"format": "pt"}))
        write_json(folder / CONFIG, checkpoint.description.to_plain())
        write_sums(folder)


def weights_hash(weights: dict[str, Tensor]) -> str:
    """Returns the SHA-256 of a model's weights, equal for a checkpoint and its export."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:200]
