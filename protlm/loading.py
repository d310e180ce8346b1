"""Loads trained models: runs, checkpoints, exported and foreign models, by path or by name."""

import os
import re
from functools import partial
from pathlib import Path

import torch

from protlm import interop
from protlm.checkpoints import checks
from protlm.checkpoints import format as checkpoints
from protlm.checkpoints.description import ModelDescription
from protlm.data.vocabulary import vocabulary_of
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import ProteinLM, build_network
from protlm.system.errors import InputDataError, UserError


def load_model(path: Path, *, device: str = "cpu") -> PretrainedModel:
    """Loads a model from a run folder, a checkpoint, an exported model or that of another program.

    A name OWNER/MODEL is one of the Hugging Face Hub.
    """
    return model_of(read_model(path), device=device)


def model_of(found: checkpoints.Checkpoint, *, device: str = "cpu") -> PretrainedModel:
    """Builds a model that was read."""
    described = found.description
    checks.check_sizes(found.path, described.model, found.weights)

    # Not a function in here, so that models can be pickled.
    rebuild = partial(network_of, described)
    try:
        with checks.LimitedMemory(found.path, found.weights):
            network = rebuild(described.seed)
        network.load_state_dict(found.weights)
    except InputDataError:
        raise
    except UserError as error:
        raise InputDataError(f"{found.path} describes an impossible model: {error}") from error
    except (RuntimeError, TypeError, ValueError, ArithmeticError, MemoryError) as error:
        raise InputDataError(
            f"{found.path} does not match its description: {misfit(error)}"
        ) from None
    return PretrainedModel(network, described, rebuild=rebuild).to(pick_device(device))


def network_of(described: ModelDescription, seed: int) -> ProteinLM:
    """Builds the network of a description with first weights."""
    return build_network(
        described.model,
        described.attention_config,
        seed=seed,
        vocabulary=vocabulary_of(described.frame),
    )


def misfit(error: Exception) -> str:
    """Returns the first difference that `load_state_dict` names, or the message."""
    lines = str(error).splitlines() or [type(error).__name__]
    pattern = r"size mismatch for (\S+): .*Size\((.*)\) from checkpoint, .*Size\((.*)\)\."
    if found := re.search(pattern, str(error)):
        return (
            f"the tensor of {found[1]} has the shape {found[2]}, and its settings need {found[3]}"
        )
    return lines[min(1, len(lines) - 1)].strip()


def read_model(path: Path) -> checkpoints.Checkpoint:
    """Reads a model without building it: its description and its weights."""
    path = interop.local_path(path)
    inner, beside = path / "model", path.parent / f"{path.stem}.safetensors"
    # Unlike those of Path, these are false for names that no file can have.
    is_of_file = path.suffix in ("", ".json") and not os.path.isdir(path)  # noqa: PTH112
    if is_of_file and os.path.isfile(beside):  # noqa: PTH113
        raise InputDataError(f"{path} is not a model; give the file beside it: {beside}")
    if os.path.isfile(inner / checkpoints.CONFIG):  # noqa: PTH113
        raise UserError(
            f"{path} is a run of protlm finetune; its model is {inner}: type -m {inner}"
        )
    found = interop.read(path) if interop.is_foreign(path) else checkpoints.read(path)
    checks.check_numbers(found.path, found.weights)
    try:
        is_known = found.description.vocabulary == vocabulary_of(found.description.frame).hash
    except UserError as error:
        raise InputDataError(f"{found.path} has an impossible frame: {error}") from error
    if not is_known:
        raise InputDataError(f"{found.path} was trained with another vocabulary than protlm has")
    return found


def pick_device(name: str) -> torch.device:
    """Returns the named device; `auto` is a GPU if there is one, and `gpu` is `cuda`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        # Lightning's name for it.
        device = torch.device(re.sub("^gpu", "cuda", name))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n", 1)[0][:80]
        raise UserError(
            f"--device {name} cannot be used ({reason}); use auto, cpu or a GPU that torch finds"
        ) from None
    return device
