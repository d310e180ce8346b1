"""Models of protlm as folders of Hugging Face transformers.

A model with the architecture of ESM becomes an `EsmForMaskedLM`, which transformers has. Every
other one is written with its code: one file, `modeling_protlm.py`, that needs torch and
transformers only.
"""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protlm import __version__
from protlm.attention import Attention
from protlm.checkpoints.checks import write_sums
from protlm.checkpoints.description import ModelDescription, differences
from protlm.checkpoints.format import CONFIG, WEIGHTS, Checkpoint
from protlm.config import Frame, HeadKind, ModelConfig, Objective, Positions
from protlm.data.alphabet import ALPHABET, TOKENIZER
from protlm.data.vocabulary import VOCABULARY, Vocabulary, vocabulary_of
from protlm.interop.base import ContactHead
from protlm.interop.bundle import Bundle, Name
from protlm.interop.esm import HUGGING_FACE_ESM, Esm
from protlm.interop.layout import FREQUENCY
from protlm.interop.protlm import NETWORK
from protlm.model.positions import Rotary
from protlm.model.transformer import build_network
from protlm.system.json_file import write_json
from protlm.system.paths import complete_folder

_TEMPLATE = "protlm.interop.remote_code.modeling_protlm"
_MODULE, _TOKENIZER = "modeling_protlm", "ProtlmTokenizer"
_HEADER = '"""A protein language model of protlm; written by protlm checkpoint export."""'
_HEADS = {Objective.masked: "MaskedLM", Objective.causal: "CausalLM"}
_TASKS = ("ForSequenceClassification", "ForTokenClassification")
# What an ESM may have in more than one way.
_FREE = (
    *HUGGING_FACE_ESM.sizes,
    *("positions", "norm_epsilon", "embedding_norm", "token_dropout", "stored_frequencies"),
)
# Of a model that was trained with relatives, which the code of the folder does not read.
_CARD = """---
library_name: transformers
---

This is a protein language model of protlm. It was trained with the relatives of proteins in their
context, but **this folder is a model of single proteins**: every row of a batch is one protein,
read without relatives, and its figures are those of the model without them. `protlm checkpoint
import` makes it a model of protlm again, which reads relatives.
"""
_SPECIAL = {f"{one}_token": f"<{one}>" for one in ("cls", "eos", "mask", "pad", "unk")}


def export(model: Checkpoint, directory: Path, contacts: ContactHead | None) -> bool:
    """Writes a model, and the contact head of an ESM, to a new folder that transformers loads.

    Returns whether the folder has code: false for an `EsmForMaskedLM`.
    """
    from safetensors.torch import save

    has_code = not is_esm(model.description)
    if has_code:
        config = _config(model)
        weights = {NETWORK + name: x for name, x in model.weights.items() if name != FREQUENCY}
    else:
        config, weights = _esm_config(model.description.model), _esm_weights(model, contacts)
    with complete_folder(directory) as folder:
        if has_code:
            (folder / f"{_MODULE}.py").write_text(_code(model.description), encoding="utf-8")
        write_json(folder / CONFIG, config)
        # Weights may be views of one tensor, which safetensors refuses.
        separate = {name: value.clone().contiguous() for name, value in weights.items()}
        (folder / WEIGHTS).write_bytes(save(separate, metadata={"format": "pt"}))
        _write_tokenizer(folder, model.description.frame, has_code=has_code)
        write_sums(folder)
        if model.description.model.relatives is not None:
            # It has no sum, because people complete it.
            (folder / "README.md").write_text(_CARD, encoding="utf-8")
    return has_code


def is_esm(description: ModelDescription) -> bool:
    """Whether a model computes what an `EsmForMaskedLM` does, for some values of its settings."""
    config = description.model
    free = {name: getattr(config, name) for name in _FREE}
    return (
        description.attention == "softmax"
        and description.frame is None
        and description.objective is Objective.masked
        and config.positions in (Positions.rotary, Positions.learned)
        and not differences(config, ModelConfig(**Esm.fixed, **free))
    )


def _esm_weights(model: Checkpoint, contacts: ContactHead | None) -> dict[str, Tensor]:
    """Returns the tensors of an `EsmForMaskedLM`, with frequencies in each layer as released."""
    config, weights = model.description.model, dict(model.weights)
    frequency = weights.pop("rotary.frequency", None)
    names = HUGGING_FACE_ESM.all_names(range(config.num_layers))
    if config.positions is Positions.learned:
        table_LD = weights["positions.table"]
        unused = table_LD.new_zeros(Esm.first_position, config.model_dim)
        weights["positions.table"] = torch.cat([unused, table_LD])
    tensors = {names[name]: value for name, value in weights.items()}
    if config.positions is Positions.rotary:
        if frequency is None:
            frequency = Rotary(head_dim=config.model_dim // config.num_heads).frequency
        for number in range(config.num_layers):
            layer = f"{HUGGING_FACE_ESM.layers}{number}."
            tensors[f"{layer}attention.self.rotary_embeddings.inv_freq"] = frequency.float()
    if contacts is not None:
        tensors |= {
            "esm.contact_head.regression.weight": torch.tensor([contacts.weights]),
            "esm.contact_head.regression.bias": torch.tensor([contacts.intercept]),
        }
    return tensors


def _esm_config(config: ModelConfig) -> dict[str, Any]:
    sizes = {theirs: getattr(config, ours) for ours, theirs in HUGGING_FACE_ESM.sizes.items()}
    sizes["max_position_embeddings"] += Esm.first_position
    return {
        "model_type": "esm",
        "architectures": ["EsmForMaskedLM"],
        "dtype": "float32",
        **sizes,
        "vocab_size": len(VOCABULARY),
        "pad_token_id": VOCABULARY.pad,
        "mask_token_id": VOCABULARY.mask,
        "position_embedding_type": (
            "rotary" if config.positions is Positions.rotary else "absolute"
        ),
        # That of a LayerNorm if the setting is null.
        "layer_norm_eps": config.norm_epsilon or 1e-5,
        "emb_layer_norm_before": config.embedding_norm,
        "token_dropout": config.token_dropout,
        "hidden_act": "gelu",
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        **dict.fromkeys(("esmfold_config", "vocab_list"), None),
        "is_folding_model": False,
        "tie_word_embeddings": True,
    }


def _config(model: Checkpoint) -> dict[str, Any]:
    described, frequency = model.description, model.weights.get(FREQUENCY)
    # An encoder without an output layer is the class without a head.
    is_encoder = described.model.head is HeadKind.none
    heads = [] if is_encoder else [f"For{_HEADS[described.objective]}"]
    return {
        "model_type": "protlm",
        "architectures": [f"Protlm{[*heads, 'Model'][0]}"],
        "auto_map": {
            "AutoConfig": f"{_MODULE}.ProtlmConfig",
            "AutoModel": f"{_MODULE}.ProtlmModel",
            **{f"AutoModel{kind}": f"{_MODULE}.Protlm{kind}" for kind in (*heads, *_TASKS)},
        },
        "dtype": "float32",
        # 4.57.6 takes the tokenizer of a newer version, or without a version, for Mistral's.
        "transformers_version": "4.48.0",
        "protlm_version": __version__,
        # Pipelines of 4.48 look for it here.
        "tokenizer_class": _TOKENIZER,
        # No other architecture builds itself, with new weights, from these settings.
        "vocab_size": None,
        "hidden_size": described.model.model_dim,
        "num_hidden_layers": described.model.num_layers,
        "num_attention_heads": described.model.num_heads,
        "pad_token_id": VOCABULARY.pad,
        "mask_token_id": VOCABULARY.mask,
        "protlm": described.to_plain(),
        "frequencies": None if frequency is None else frequency.tolist(),
    }


def _code(description: ModelDescription) -> str:
    heads = [f"Protlm{kind}" for kind in (*(f"For{head}" for head in _HEADS.values()), *_TASKS)]
    network = build_network(description.model, description.attention_config, seed=0)
    used = {type(part) for part in network.modules() if isinstance(part, Attention)}
    classes = {
        cls.__module__.rpartition(".")[2]: Name(cls.__module__, cls.__name__)
        for cls in sorted(used, key=str)
    }
    roots = [Name(_TEMPLATE, name) for name in ("ProtlmModel", *heads, _TOKENIZER)]
    bundle = Bundle(
        [*roots, *classes.values()],
        {
            Name("protlm.attention", "mechanism"): Name(_TEMPLATE, "mechanism"),
            Name("protlm.attention", "names"): Name(_TEMPLATE, "names"),
            Name("protlm.attention.linearized.selection", "chosen_attention"): Name(
                _TEMPLATE, "chosen_attention"
            ),
        },
    )
    entries = [f"    {name!r}: {bundle.final_names[place]},\n" for name, place in classes.items()]
    return f"{_HEADER}\n\n{bundle.source()}\n\nMECHANISMS.update({{\n{''.join(entries)}}})\n"


def tokenizer_of(frame: Frame | None) -> str:
    """Returns the text of `tokenizer.json`, which the library `tokenizers` reads by itself."""
    text = files("protlm.interop.remote_code").joinpath(TOKENIZER).read_text(encoding="utf-8")
    return (
        text if frame is None else json.dumps(_with_frame(json.loads(text), vocabulary_of(frame)))
    )


def _write_tokenizer(folder: Path, frame: Frame | None, *, has_code: bool) -> None:
    settings: dict[str, Any] = {"model_max_length": 10**30, **_SPECIAL}
    if has_code:
        # Residues are read as in the commands; one `<unk>` for each letter that they refuse.
        (folder / TOKENIZER).write_text(tokenizer_of(frame), encoding="utf-8")
        settings |= {
            "tokenizer_class": _TOKENIZER,
            "auto_map": {"AutoTokenizer": [None, f"{_MODULE}.{_TOKENIZER}"]},
            "padding_side": "right",
            "model_input_names": ["input_ids", "attention_mask"],
        }
    else:
        (folder / ALPHABET).write_text("\n".join(VOCABULARY.tokens) + "\n", encoding="utf-8")
        write_json(folder / "special_tokens_map.json", _SPECIAL)
        settings["tokenizer_class"] = "EsmTokenizer"
    write_json(folder / "tokenizer_config.json", settings)


def _with_frame(tokenizer: dict[str, Any], words: Vocabulary) -> dict[str, Any]:
    """Returns a tokenizer with the tokens and the frame of a model."""
    own, frame = words.frame.own_tokens, words.frame
    tokenizer["model"]["vocab"] |= {token: words[token] for token in own}
    # In a sequence they are letters that are refused, as "." and "-" are.
    refused = "".join(re.escape(token) for token in own if len(token) == 1)
    tokenizer["normalizer"]["normalizers"][-1]["pattern"] = {"Regex": f"[.{refused}-]"}
    before, after = (
        [{"SpecialToken": {"id": token, "type_id": 0}} for token in some]
        for some in (frame.prefix, frame.suffix)
    )
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    single = [*before, first, *after]
    tokenizer["post_processor"] |= {
        "single": single,
        "pair": [*single, second, *after],
        "special_tokens": {
            one: {"id": one, "ids": [words[one]], "tokens": [one]} for one in words.tokens
        },
    }
    return tokenizer
