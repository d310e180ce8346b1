"""`protlm checkpoint info|verify|export|consolidate`: describes, verifies and converts models."""

from pathlib import Path

from protlm.build import load_model
from protlm.checkpoints import format as checkpoints
from protlm.checkpoints.best import best_checkpoints
from protlm.checkpoints.checksums import check_sum
from protlm.checkpoints.sharded import consolidated
from protlm.config import BestMetric
from protlm.errors import InputDataError, UserError
from protlm.model.transformer import num_parameters
from protlm.paths import check_output


def info(path: Path) -> None:
    """Describes the newest checkpoint of a run, a checkpoint or an exported model."""
    model = load_model(path)
    rows = {
        "file": str(checkpoints.read(path).path),
        "objective": model.description.objective.value,
        "parameters": f"{num_parameters(model.network):,}",
        "longest input": "unbounded" if model.max_length is None else str(model.max_length),
        "weights hash": model.hash,
        "vocabulary hash": model.description.vocabulary,
    }
    described = model.description.to_plain()
    for section in ("model", "attention"):
        rows |= {f"{section}.{key}": str(v) for key, v in described[section].items()}
    for metric in BestMetric:
        for best in best_checkpoints(path, metric, 1):
            rows[f"best by {metric}"] = str(best)
    for key, value in rows.items():
        print(f"{key:<26} {value}")


def verify(path: Path) -> None:
    """Verifies every checkpoint of a run, one checkpoint, or an exported model.

    Raises:
        InputDataError: names the damaged files.
    """
    is_run = (path / checkpoints.CHECKPOINTS).is_dir()
    files = checkpoints.all_checkpoints(path) if is_run else [path]
    if not files:
        raise InputDataError(f"{path} does not contain a checkpoint yet")
    faults, newest = [], None
    if is_run:
        try:
            newest = checkpoints.latest(path)
        except InputDataError as error:
            faults.append(str(error))
    for file in files:
        try:
            _verify_one(file)
            print(f"{file}: good{', the latest' if file == newest else ''}")
        except InputDataError as error:
            print(f"{file}: damaged")
            faults.append(str(error))
    if newest is not None and newest not in files:
        faults.append(f"{newest}, the latest, is missing")
    if faults:
        raise InputDataError("\n".join(faults))


def _verify_one(path: Path) -> None:
    if path.is_dir() and path.suffix == ".ckpt":
        check_sum(path)
    else:
        load_model(path)


def consolidate(path: Path, output: Path) -> None:
    """Converts a sharded checkpoint, or the latest of a run, to an ordinary one.

    Raises:
        UserError: the output does not end in .ckpt.
        InputDataError: the checkpoint is missing or damaged.
        OutputError: the output exists or cannot be written.
    """
    if output.suffix != ".ckpt":
        raise UserError(f"--output {output} must end in .ckpt; type: -o {output}.ckpt")
    if not path.exists():
        raise InputDataError(f"{path} does not exist; give a run or one of its checkpoints")
    newest = checkpoints.latest(path) if (path / checkpoints.CHECKPOINTS).is_dir() else path
    if newest is None:
        raise InputDataError(f"{path} does not contain a checkpoint yet")
    check_output(output)
    checkpoints.write_training(consolidated(newest), output)
    print(output)


def export(path: Path, output: Path, dtype: str = "float32") -> None:
    """Writes `model.safetensors`, `config.json` and their checksums to a new folder.

    Args:
        path: a run, a checkpoint or an exported model.
        output: the new folder.
        dtype: `bfloat16` halves the file: parameters are rounded, buffers are not.

    Raises:
        UserError: another `dtype`.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype {dtype} is not one of float32, bfloat16")
    parameters = [name for name, _ in load_model(path).network.named_parameters()]
    rounded = parameters if dtype == "bfloat16" else []
    checkpoints.export(checkpoints.read(path), output, rounded=rounded)
    print(output)
