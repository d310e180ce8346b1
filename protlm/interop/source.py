"""The files of a foreign model: settings and tensors, read without running code from them.

A model is a folder of Hugging Face or AbLang; a `.pt` file of fair-esm, and a contact head beside
it; a `.pth` file of ESM C; a state dict, or a checkpoint that has one, with `config.json` beside
it; or a `.safetensors` file with a `.json` file of its name.
"""

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protlm.checkpoints.checks import SUMS, check_weights, sum_path
from protlm.checkpoints.format import CONFIG
from protlm.system.errors import InputDataError
from protlm.system.json_file import read_json
from protlm.system.paths import existing_file, sha256_of

_PICKLES = (".pt", ".pth")
_SUFFIXES = (*_PICKLES, ".safetensors")
# The description of an AbLang, and its weights.
_ABLANG = ("hparams.json", "amodel.pt")
# An adapter of PEFT.
ADAPTER = "adapter_config.json"
# What fair-esm calls the architecture of ESM-1b and ESM-1v.
_ESM_1B = "roberta_large"
_CONTACTS = "-contact-regression"
# A tensor that every ESM C has.
_ESM_C = "sequence_head.0.weight"
# A file beside the index.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Source:
    """A foreign model as it was read.

    Attributes:
        hashes: `sha256`, the SHA-256 of the file of the tensors; of several, of their bytes in
            order; and `contacts_sha256`, that of a separate file of the contact head.
    """

    path: Path
    family: str
    settings: Mapping[str, Any]
    tensors: dict[str, Tensor]
    hashes: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """Where the file of the alphabet is."""
        return self.path if self.path.is_dir() else self.path.parent

    def number(self, key: str) -> int:
        """Returns a setting that is a positive whole number."""
        value = self.settings.get(key)
        value = int(value) if type(value) is float and value.is_integer() else value
        if type(value) is not int or value < 1:
            raise InputDataError(f"{self.path}: {key}={value!r:.40} must be a whole number above 0")
        return value

    def fraction(self, key: str, default: float) -> float:
        """Returns a setting that is a number between 0 and 1."""
        value = self.settings.get(key, default)
        if type(value) not in (int, float) or not 0 < value < 1:
            raise InputDataError(f"{self.path}: {key}={value!r:.40} must be between 0 and 1")
        return value

    def choice(self, key: str, allowed: tuple[Any, ...]) -> Any:
        """Returns a setting that has one of the supported values; a missing one has the first."""
        value = self.settings.get(key, allowed[0])
        if value not in allowed or type(value) not in map(type, allowed):
            supported = " or ".join(map(repr, allowed))
            raise InputDataError(
                f"{self.path}: {key}={value!r:.100} is not supported; protlm reads models with "
                f"{key}={supported}"
            )
        return value


def is_foreign(path: Path) -> bool:
    """Whether a path is the model of another program, by its form."""
    try:
        if not path.is_dir():
            is_ours = sum_path(path).exists() or path.name.startswith("step-")
            is_other = path.suffix == ".ckpt" and path.is_file() and not is_ours
            return path.suffix in _SUFFIXES or is_other
        has_own_name = any((path / name).is_file() for name in (ADAPTER, _ABLANG[0]))
        return has_own_name or "model_type" in _json(path / CONFIG)
    except OSError:
        return False
    except InputDataError:
        # Reading it says what is wrong with its description, if it is not one of protlm's.
        return (path / CONFIG).is_file() and not (path / SUMS).is_file()


def read_source(path: Path) -> Source:
    """Reads a foreign model."""
    if path.is_dir():
        return _read_folder(path)
    existing_file(path, "a model")
    if path.suffix == ".ckpt" or (path.suffix in _PICKLES and path.with_name(CONFIG).is_file()):
        return _read_state(path)
    if path.suffix in _PICKLES:
        return _read_pickle(path)
    description = path.with_suffix(".json")
    if not description.is_file():
        raise InputDataError(
            f"{path} has no {description.name} beside it that describes the model; give the folder "
            "of a Hugging Face or exported model"
        )
    settings = _json(description)
    if isinstance(settings.get("architecture"), dict):
        settings |= settings["architecture"]
    family = str(settings.get("family")).partition(" ")[0].lower()
    hashes = {"sha256": sha256_of(path)}
    if settings.get("weights_sha256", hashes["sha256"]) != hashes["sha256"]:
        raise InputDataError(
            f"{path} is not the file that {description.name} describes, by its weights_sha256; get "
            "both again"
        )
    return Source(path, family, settings, _together([path], _safetensors), hashes)


def _read_folder(folder: Path) -> Source:
    if (folder / _ABLANG[0]).is_file():
        weights = existing_file(folder / _ABLANG[1], "the weights of AbLang")
        settings, hashes = _json(folder / _ABLANG[0]), {"sha256": sha256_of(weights)}
        return Source(folder, "ablang", settings, _together([weights], _unpickled), hashes)
    settings = _json(folder / CONFIG)
    files, tensors = read_tensors(folder, "model.safetensors", "pytorch_model.bin")
    return Source(
        folder,
        str(settings.get("model_type")).lower(),
        settings,
        tensors,
        {"sha256": sha256_of(*files)},
    )


def read_tensors(folder: Path, safe: str, pickled: str) -> tuple[list[Path], dict[str, Tensor]]:
    """Returns the files of the first of two names, and their tensors."""
    for name, read in ((safe, _safetensors), (pickled, _unpickled)):
        if files := _files(folder, name):
            return files, _together(files, read)
    raise InputDataError(
        f"{folder} has no weights: neither {safe} nor {pickled}, nor the index of either"
    )


def _files(folder: Path, name: str) -> list[Path]:
    """Returns the file of a name, or the parts that its index lists, or nothing."""
    index = folder / f"{name}.index.json"
    if (folder / name).exists():
        return [existing_file(folder / name, "the weights of a model")]
    if not index.exists():
        return []
    parts = _json(index).get("weight_map")
    if not isinstance(parts, dict) or not parts:
        raise InputDataError(f"{index} lists no files in weight_map")
    for part in parts.values():
        if not isinstance(part, str) or not _PLAIN_NAME.fullmatch(part):
            raise InputDataError(f"{index} lists {part!r:.60}, which is not a file in its folder")
    return [
        existing_file(folder / part, "a part of the model") for part in sorted(set(parts.values()))
    ]


def _read_state(path: Path) -> Source:
    """Reads the state of a model, or a checkpoint that contains one, beside the settings."""
    contents, beside = _unpickled(path), path.with_name(CONFIG)
    if not beside.is_file():
        raise InputDataError(
            f"{path} does not say what its model is; put the {CONFIG} of the model that was "
            "trained beside it"
        )
    if averages := [key for key in contents if re.search(r"(^|_)ema(_|$)", str(key))]:
        print(f"{path}: left out averages of the weights: {', '.join(averages)}", file=sys.stderr)
    settings, tensors = _json(beside), check_weights(path, contents.get("state_dict", contents))
    return Source(
        path,
        str(settings.get("model_type")).lower(),
        settings,
        tensors,
        {"sha256": sha256_of(path)},
    )


def _read_pickle(path: Path) -> Source:
    with torch.serialization.safe_globals([argparse.Namespace]):
        contents = _unpickled(path)
    hashes = {"sha256": sha256_of(path)}
    if _ESM_C in contents:
        return Source(path, "esmc", {}, check_weights(path, contents), hashes)
    settings, state = _fair_esm_settings(path, contents), contents.get("model")
    if settings is None or not isinstance(state, dict):
        raise InputDataError(
            f"{path} is neither an ESM-2, ESM-1b or ESM-1v of fair-esm, with settings and model, "
            "nor an ESM C model; save a model of transformers by save_pretrained(FOLDER), and give "
            "FOLDER"
        )
    tensors, beside = check_weights(path, state), path.with_name(f"{path.stem}{_CONTACTS}.pt")
    if beside.is_file():
        existing_file(beside, "a contact head")
        head = check_weights(beside, _unpickled(beside).get("model"))
        if other := [name for name in head if "contact_head." not in name]:
            raise InputDataError(
                f"{beside} has {other[0]!r:.90}, which is not part of a contact head"
            )
        tensors |= head
        hashes["contacts_sha256"] = sha256_of(beside)
    return Source(path, "esm", settings, tensors, hashes)


def _fair_esm_settings(path: Path, contents: Mapping[str, Any]) -> dict[str, Any] | None:
    group, first = contents.get("cfg"), contents.get("args")
    settings = group.get("model") if isinstance(group, dict) else None
    if not isinstance(settings, argparse.Namespace):
        if not isinstance(first, argparse.Namespace):
            return None
        if (kind := getattr(first, "arch", None)) != _ESM_1B:
            raise InputDataError(
                f"{path} is a model of fair-esm with arch={kind!r:.40}, such as ESM-1 or MSA "
                "Transformer, which protlm does not read; give an ESM-2, ESM-1b or ESM-1v"
            )
        settings = first
    # What JSON could contain too. Released files have names with and without a prefix.
    kinds = (bool, int, float, str, type(None))
    plain = {key: value for key, value in vars(settings).items() if type(value) in kinds}
    return {key.removeprefix("encoder_"): value for key, value in plain.items()} | plain


def _json(path: Path) -> dict[str, Any]:
    return read_json(path, "the description of a model")


def _safetensors(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:
        raise InputDataError(
            f"{path} is not a file of safetensors, or incomplete "
            f"({str(error).splitlines()[0]:.100}); get it again"
        ) from error


def _together(files: list[Path], read: Callable[[Path], dict[str, Any]]) -> dict[str, Tensor]:
    """Returns the tensors of the files of a model."""
    tensors: dict[str, Any] = {}
    for path in files:
        part = read(path)
        if repeated := sorted(map(str, tensors.keys() & part.keys())):
            raise InputDataError(f"{path} repeats {repeated[0]!r:.90} of another file of the model")
        tensors |= part
    return check_weights(files[0], tensors)


def _unpickled(path: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            # Of torch, about the protocol of a pickle that is refused.
            warnings.simplefilter("ignore")
            contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise InputDataError(
                f"{path} is refused: it would call {found[1]:.60}, and a model consists of tensors "
                "and settings only; if you trust it, save its weights: state = torch.load(PATH, "
                'weights_only=False); torch.save(state["state_dict"], "model.pt")'
            ) from None
        raise InputDataError(
            f"{path} is not a file of tensors as torch.save writes it, or incomplete; get it again"
        ) from error
    if not isinstance(contents, dict):
        raise InputDataError(f"{path} is not a model: it contains a {type(contents).__name__}")
    return contents
