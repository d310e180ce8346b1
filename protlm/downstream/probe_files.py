"""The folder of a probe: plain arrays and a description, with SHA-256 checksums.

`probe.safetensors` has `weights` [D, outputs] and `bias` [outputs], float64, of features that are
not standardized; `probe.json` says what they predict, and from which layer of which model.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protlm.checkpoints.checks import check_numbers, damaged_files, write_sums
from protlm.downstream.linear import LinearModel
from protlm.downstream.tasks import Task
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError, UserError
from protlm.system.json_file import from_json, read_json

WEIGHTS, DESCRIPTION = "probe.safetensors", "probe.json"
_FORMAT = 1


@dataclass(frozen=True)
class Probe:
    """A linear model on the hidden states of one layer of one model, and what it predicts.

    The states are averaged over residues, except for residue classes. A number has no classes. The
    hash is that of the model's weights.
    """

    task: Task
    classes: list[str]
    layer: int
    model_hash: str
    fitted: LinearModel

    def check_model(self, model: PretrainedModel) -> None:
        """Refuses another model than the one that the probe was fitted on."""
        if model.hash != self.model_hash:
            raise UserError(
                f"the probe was fitted on a model with the hash {self.model_hash[:12]}, and this "
                f"one has {model.hash[:12]}; give the same model: -m MODEL"
            )
        width = model.description.model.model_dim
        if not 0 <= self.layer <= model.num_layers or self.fitted.weights.shape[0] != width:
            raise InputDataError(
                "the probe is damaged: its layer or its width does not fit its model, with "
                f"layers 0 to {model.num_layers} and {width} features"
            )


def write_probe(folder: Path, probe: Probe) -> None:
    """Writes the files of a probe into a folder, and the checksums of all files in it."""
    from safetensors.numpy import save

    arrays = {"weights": probe.fitted.weights.copy(order="C"), "bias": probe.fitted.bias}
    (folder / WEIGHTS).write_bytes(save(arrays))
    content: dict[str, Any] = {"format": _FORMAT, **asdict(probe)}
    del content["fitted"]
    text = json.dumps(content, indent=2) + "\n"
    (folder / DESCRIPTION).write_text(text, encoding="utf-8")
    write_sums(folder)


def read_probe(folder: Path) -> Probe:
    """Reads a probe."""
    from safetensors.torch import load_file

    if not (folder / DESCRIPTION).is_file():
        inner = folder / "probe"
        found = f"; {inner} is one" if (inner / DESCRIPTION).is_file() else ""
        raise InputDataError(f"{folder} is not a folder that protlm probe has written{found}")
    for name in damaged_files(folder, required=(WEIGHTS, DESCRIPTION)):
        raise InputDataError(
            f"{folder / name} is damaged or missing; give a folder that protlm probe has written"
        )
    try:
        content = read_json(folder / DESCRIPTION, "a probe")
        arrays = load_file(folder / WEIGHTS)
        if content.pop("format", None) != _FORMAT:
            raise ValueError("it has another format")
        fitted = LinearModel(arrays["weights"].numpy(), arrays["bias"].numpy())
        found = from_json(Probe, {**content, "fitted": fitted})
    except Exception as error:
        raise InputDataError(f"{folder} is not a probe: {str(error)[:200]}") from error
    check_numbers(folder, arrays)
    outputs = len(found.classes) or 1
    if fitted.weights.shape[1:] != (outputs,) or fitted.bias.shape != (outputs,):
        raise InputDataError(f"{folder} is not a probe: it does not have {outputs} outputs")
    return found
