"""`protlm checkpoint info|verify|export`: what a checkpoint holds, whether it is whole, a copy."""

from pathlib import Path

from protlm.build import load_model
from protlm.errors import InputDataError
from protlm.model import checkpoint as checkpoints
from protlm.model.transformer import num_parameters


def info(path: Path) -> None:
    """Prints what a run's newest checkpoint, a checkpoint or an exported folder holds."""
    model = load_model(path)
    rows = {
        "file": str(checkpoints.read(path).path),
        "objective": model.description["objective"],
        "parameters": f"{num_parameters(model.network):,}",
        "longest input": "unbounded" if model.max_length is None else str(model.max_length),
        "weights hash": model.hash,
        "vocabulary hash": model.description["vocabulary"],
    }
    for section in ("model", "attention"):
        rows |= {f"{section}.{key}": str(v) for key, v in model.description[section].items()}
    for key, value in rows.items():
        print(f"{key:<26} {value}")


def verify(path: Path) -> None:
    """Checks every checkpoint of a run, one checkpoint, or an exported folder.

    Raises:
        InputDataError: names the damaged files.
    """
    folder = path / checkpoints.CHECKPOINTS
    files = sorted(folder.glob("step-*.ckpt")) if folder.is_dir() else [path]
    if not files:
        raise InputDataError(f"{path} holds no checkpoint yet")
    faults = []
    for file in files:
        try:
            load_model(file)
            print(f"{file}: good")
        except InputDataError as error:
            print(f"{file}: damaged")
            faults.append(str(error))
    if faults:
        raise InputDataError("\n".join(faults))


def export(path: Path, output: Path) -> None:
    """Writes `model.safetensors`, `config.json` and their sums into a new folder."""
    load_model(path)
    checkpoints.export(checkpoints.read(path), output)
    print(output)
