"""LoRA adapters of PEFT, merged into the model that they were trained on.

W + s B A with s = α/r (LoRA, arXiv 2106.09685), or α/√r (rsLoRA, arXiv 2312.03732); an embedding
becomes E + s (B A)ᵀ. Modules that were trained whole replace those of the model. The names are
those of the other program, before any are translated.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from protlm.interop.base import Family
from protlm.interop.hub import local_path
from protlm.interop.source import ADAPTER, Source, read_tensors
from protlm.system.errors import InputDataError
from protlm.system.json_file import read_json
from protlm.system.paths import sha256_of

# Settings with which W + s B A is not what was trained.
_REFUSED = (
    *("use_dora", "lora_bias", "fan_in_fan_out", "layer_replication", "target_parameters"),
    *("trainable_token_indices", "use_qalora"),
)
# First values that leave the weights of the base as they are; others, such as pissa, change them.
_STARTS = (True, False, "gaussian", "orthogonal", "eva")
_LORA = re.compile(r"(.+)\.lora_((embedding_)?[AB])(\.weight)?")


def adapter_folder(path: Path) -> Path | None:
    """Returns the folder of an adapter, given it or a file of its weights."""
    folder = path.parent if path.name.startswith("adapter_model.") else path
    return folder if (folder / ADAPTER).is_file() else None


def base_of(folder: Path) -> Path:
    """Returns the model that an adapter names as its base."""
    named = read_json(folder / ADAPTER, "an adapter").get("base_model_name_or_path")
    path = local_path(Path(named)) if isinstance(named, str) else Path()
    if not named or not path.exists():
        raise InputDataError(
            f"{folder} is an adapter of PEFT to {named!r:.90}, which is not a model here; give its "
            f"base: protlm checkpoint import {folder}, with the base",
            {"base": "MODEL"},
        )
    return path


def merged(base: Source, folder: Path, family: type[Family]) -> Source:
    """Returns a model with the changes of an adapter, each of whose tensors is used once."""
    settings = read_json(folder / ADAPTER, "an adapter")
    _check(folder, settings)
    files, tensors = read_tensors(folder, "adapter_model.safetensors", "adapter_model.bin")
    weights, pairs = dict(base.tensors), dict[str, dict[str, Tensor]]()
    for name, value in tensors.items():
        plain = re.sub(r"^(base_model\.model\.)+", "", name)
        found = _LORA.fullmatch(plain)
        plain = f"{found[1]}.weight" if found else plain
        own = next((n for n in (plain, family.encoder + plain) if n in weights), plain)
        if found:
            pairs.setdefault(own, {})[found[2]] = value
        elif own in weights and weights[own].shape != value.shape:
            raise _misfit(folder, own, base)
        else:
            weights[own] = value
    for name, pair in pairs.items():
        is_linear = {*pair} == {"A", "B"}
        # The output layer of a whole model is tied to the embedding without its change.
        if name not in weights or not (is_linear or (len(pair) == 2 and family.is_encoder(base))):
            raise _misfit(folder, name, base)
        a_RM, b_LR = (pair[key].double() for key in sorted(pair))
        change = _scale(settings, name.removesuffix(".weight"), len(a_RM)) * (b_LR @ a_RM)
        change = change if is_linear else change.mT
        if change.shape != weights[name].shape:
            raise _misfit(folder, name, base)
        weights[name] = (weights[name].double() + change).to(weights[name].dtype)
    return replace(
        base,
        tensors=weights,
        hashes={**base.hashes, "adapter_sha256": sha256_of(*files)},
    )


def _misfit(folder: Path, name: str, base: Source) -> InputDataError:
    return InputDataError(
        f"{folder} changes {name!r:.90}, which {base.path} does not have, has in another shape, or "
        "has tied to its output layer; give the base that it was trained on",
        {"base": "MODEL"},
    )


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    patterns = (settings.get("alpha_pattern") or {}).items()
    matching = (v for key, v in patterns if re.fullmatch(rf"(.*\.)?({key})", module))
    alpha = next(matching, settings.get("lora_alpha", 8))
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _check(folder: Path, settings: Mapping[str, Any]) -> None:
    refused = {key: settings[key] for key in _REFUSED if settings.get(key)}
    for key, allowed in (("peft_type", ("LORA",)), ("init_lora_weights", _STARTS)):
        if settings.get(key, allowed[0]) not in allowed:
            refused[key] = settings[key]
    for key, value in refused.items():
        raise InputDataError(
            f"{folder}: an adapter with {key}={value!r:.60} is not supported; merge it by PEFT, "
            "model.merge_and_unload().save_pretrained(FOLDER), and give FOLDER"
        )
