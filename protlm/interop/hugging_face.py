"""Models of protlm as folders of Hugging Face transformers.

A model with the architecture of ESM becomes an `EsmForMaskedLM`, which transformers has. Every
other one is written with its code: one file, `modeling_protlm.py`, that needs torch and
transformers only.
"""

import inspect
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import Tensor

from protlm import attention
from protlm.checkpoints.checksums import write_sums
from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import CONFIG, WEIGHTS, Checkpoint
from protlm.config import Objective
from protlm.data.vocabulary import VOCABULARY
from protlm.interop.alphabet import ALPHABET, TOKENIZER
from protlm.interop.base import ContactHead
from protlm.interop.bundle import Bundle, Name
from protlm.interop.esm_export import is_esm, to_esm
from protlm.interop.protlm import NETWORK
from protlm.system.paths import complete_folder

_TEMPLATE = "protlm.interop.remote_code.modeling_protlm"
_SELECTION = "protlm.attention.linearized.selection"
_MODULE, _TOKENIZER = "modeling_protlm", "ProtlmTokenizer"
_HEADER = (
    '"""A protein language model of protlm; written by protlm checkpoint export --format hf."""'
)
_HEADS = {Objective.masked: "MaskedLM", Objective.causal: "CausalLM"}
_SPECIAL = {
    "cls_token": "<cls>",
    "eos_token": "<eos>",
    "mask_token": "<mask>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}


def export(model: Checkpoint, directory: Path, contacts: ContactHead | None) -> bool:
    """Writes a model to a new folder that transformers loads.

    Args:
        model: the model, whose weights match its description.
        directory: the folder.
        contacts: the contact head of a model with the architecture of ESM.

    Returns:
        Whether the folder has code: false for an `EsmForMaskedLM`.
    """
    has_code = not is_esm(model.description)
    if not has_code:
        config, weights = to_esm(model, contacts)
    else:
        config = _config(model)
        weights = {NETWORK + name: value for name, value in model.weights.items()}
    with complete_folder(directory) as folder:
        if has_code:
            (folder / f"{_MODULE}.py").write_text(_code(model.description), encoding="utf-8")
        _write_json(folder / CONFIG, config)
        _write_weights(folder / WEIGHTS, weights)
        _write_tokenizer(folder, has_code=has_code)
        write_sums(folder)
    return has_code


def _config(model: Checkpoint) -> dict[str, Any]:
    described = model.description
    head = f"ProtlmFor{_HEADS[described.objective]}"
    classes = {"Config": "Config", "Model": "Model", f"ModelFor{_HEADS[described.objective]}": head}
    return {
        "model_type": "protlm",
        "architectures": [head],
        "auto_map": {
            f"Auto{auto}": f"{_MODULE}.{name if name == head else f'Protlm{name}'}"
            for auto, name in classes.items()
        },
        "dtype": "float32",
        # No other architecture builds itself, with new weights, from these settings.
        "vocab_size": None,
        "hidden_size": described.model.model_dim,
        "num_hidden_layers": described.model.num_layers,
        "num_attention_heads": described.model.num_heads,
        "pad_token_id": VOCABULARY.pad,
        "mask_token_id": VOCABULARY.mask,
        "protlm": described.to_plain(),
        "stored_norms": [name for name in model.weights if name.endswith(".query_norm.scale")],
    }


def _code(description: ModelDescription) -> str:
    """Returns the modeling file: the definitions that the model needs."""
    heads = [f"ProtlmFor{head}" for head in _HEADS.values()]
    classes = {name: _place_of(name) for name in _mechanisms(description)}
    roots = [Name(_TEMPLATE, name) for name in ("ProtlmModel", *heads, _TOKENIZER)]
    bundle = Bundle(
        [*roots, *classes.values()],
        {
            Name("protlm.attention", "mechanism"): Name(_TEMPLATE, "mechanism"),
            Name("protlm.attention", "names"): Name(_TEMPLATE, "names"),
            Name(_SELECTION, "chosen_attention"): Name(_TEMPLATE, "chosen_attention"),
        },
    )
    entries = [f"    {name!r}: {bundle.final_names[place]},\n" for name, place in classes.items()]
    return f"{_HEADER}\n\n{bundle.source()}\n\nMECHANISMS.update({{\n{''.join(entries)}}})\n"


def _mechanisms(description: ModelDescription) -> list[str]:
    """Returns the mechanism, and the one that it contains, as `hybrid` does."""
    parameter = inspect.signature(attention.mechanism(description.attention)).parameters.get(
        "mechanism"
    )
    if parameter is None:
        return [description.attention]
    inner = description.attention_options.get("mechanism", parameter.default)
    return [description.attention, inner]


def _place_of(mechanism: str) -> Name:
    cls = attention.mechanism(mechanism)
    return Name(cls.__module__, cls.__name__)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save

    # Weights may be views of one tensor, which safetensors refuses.
    separate = {name: value.clone().contiguous() for name, value in weights.items()}
    path.write_bytes(save(separate, metadata={"format": "pt"}))


def _write_tokenizer(folder: Path, *, has_code: bool) -> None:
    settings: dict[str, Any] = {"model_max_length": 10**30, **_SPECIAL}
    if has_code:
        # Residues are read as in the commands; one `<unk>` for each letter that they refuse.
        text = files("protlm.interop.remote_code").joinpath(TOKENIZER).read_text(encoding="utf-8")
        (folder / TOKENIZER).write_text(text, encoding="utf-8")
        auto = {"AutoTokenizer": [None, f"{_MODULE}.{_TOKENIZER}"]}
        settings |= {"tokenizer_class": _TOKENIZER, "auto_map": auto}
        settings |= {"padding_side": "right", "model_input_names": ["input_ids", "attention_mask"]}
        _write_json(folder / "tokenizer_config.json", settings)
        return
    (folder / ALPHABET).write_text("\n".join(VOCABULARY.tokens) + "\n", encoding="utf-8")
    _write_json(folder / "special_tokens_map.json", _SPECIAL)
    settings["tokenizer_class"] = "EsmTokenizer"
    _write_json(folder / "tokenizer_config.json", settings)
