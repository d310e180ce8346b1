"""ESM-2 (doi:10.1126/science.ade2574), ESM-1b (doi:10.1073/pnas.2016239118) and ESM-1v.

From a folder of `EsmForMaskedLM`, or from the `.pt` file of fair-esm, whose contact head is in
another file beside it. The vocabulary is protlm's.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from protlm.checkpoints.weight_checks import check_numbers
from protlm.config import Activation, HeadKind, ModelConfig, Positions
from protlm.data.vocabulary import VOCABULARY
from protlm.interop.alphabet import ALPHABET, TOKENIZER, read_alphabet, read_numbers
from protlm.interop.base import (
    ContactHead,
    Family,
    Translated,
    check_shapes,
    check_sizes,
    layers,
    modules,
    renamed,
    with_modern_names,
    without,
    without_copy,
    without_output_matrix,
)
from protlm.interop.fairseq import HEAD, LAYER
from protlm.interop.source import Source
from protlm.system.errors import InputDataError

_HF_LAYER = {
    "attention_norm": "attention.LayerNorm",
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "feedforward_norm": "LayerNorm",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
}
# fair-esm's table of positions.
_POSITIONS = "embed_positions.weight"
# Hugging Face's names of embeddings and heads.
_HF_EMBEDDING = "esm.embeddings.word_embeddings.weight"
HF_POSITIONS = "esm.embeddings.position_embeddings.weight"
_HF_UNUSED = r"esm\.(embeddings\.position_ids|pooler\..*|contact_head\..*)"
HF_CONTACTS = "esm.contact_head.regression"
_CONTACTS = re.compile(r"(.*\.)?contact_head\.regression\.(weight|bias)")
HF_LAYERS = "esm.encoder.layer."
_FREQUENCY = re.compile(r"(.*\.)?(rotary_embeddings|rot_emb)\.inv_freq")
# The rotary positions of ESM-2 in the settings of newer versions.
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_EPSILON = 1e-5
# The number of tokens of SaProt.
_SAPROT = 446
# The settings of all models of the family.
SHARED: dict[str, Any] = {
    "activation": Activation.gelu,
    "attention_bias": True,
    "head": HeadKind.dense_norm,
    "tied_head": True,
}
# Rows of the table of positions before that of the first token.
OFFSET = VOCABULARY.pad + 1


@final
class Esm(Family):
    """ESM-2, ESM-1b and ESM-1v."""

    def translate(self, source: Source) -> Translated:
        if "encoder_layers" in source.settings:
            config, weights = _from_fair_esm(source)
        else:
            config, weights = _from_hugging_face(source)
        shapes = {
            "embedding.weight": (len(VOCABULARY), config.model_dim),
            "head.bias": (len(VOCABULARY),),
        }
        check_shapes(source.path, weights, shapes)
        check_sizes(source.path, config, weights)
        return Translated(config, weights, _contact_head(source, config))


def _from_hugging_face(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    config = _hugging_face_config(source)
    for name, read in ((ALPHABET, read_alphabet), (TOKENIZER, read_numbers)):
        path = source.path / name
        if path.is_file() and tuple(read(path)) != VOCABULARY.tokens:
            raise InputDataError(
                f"{path} does not have the 33 tokens of ESM-2 in their order, in which protlm "
                "reads the embedding; give a model with the alphabet of ESM-2"
            )
    tensors = without(with_modern_names(source.tensors), _HF_UNUSED)
    tensors, frequency = _without_frequencies(source, tensors)
    without_output_matrix(source, tensors, "lm_head.decoder.weight", _HF_EMBEDDING)
    if config.positions is not Positions.learned:
        # Transformers 4 saved a table that was never used.
        tensors.pop(HF_POSITIONS, None)
    weights = renamed(source.path, tensors, hugging_face_names(config, tensors))
    if config.positions is Positions.learned:
        check_shapes(source.path, weights, {"positions.table": (None, config.model_dim)})
        weights["positions.table"] = weights["positions.table"][OFFSET:]
    elif frequency is not None:
        weights["rotary.frequency"] = frequency
        config.stored_frequencies = True
    return config, weights


def hugging_face_names(config: ModelConfig, tensors: Iterable[str]) -> dict[str, str]:
    """Returns the names of the weights, ours to those of Hugging Face.

    Args:
        config: the model.
        tensors: names of Hugging Face, which tell how many layers there are.
    """
    names = {"embedding.weight": _HF_EMBEDDING, "head.bias": "lm_head.bias"}
    if config.positions is Positions.learned:
        names["positions.table"] = HF_POSITIONS
    if config.embedding_norm:
        names |= modules("esm.embeddings.", {"embedding_norm": "layer_norm"})
    names |= modules("esm.encoder.", {"final_norm": "emb_layer_norm_after"})
    return names | modules("", HEAD) | layers(HF_LAYERS, _HF_LAYER, tensors)


def _contact_head(source: Source, config: ModelConfig) -> ContactHead | None:
    pairs = [(_CONTACTS.fullmatch(name), value) for name, value in source.tensors.items()]
    parts = {found[2]: value for found, value in pairs if found}
    if not parts:
        return None
    num_heads = config.num_layers * config.num_heads
    sizes = {part: value.numel() for part, value in parts.items()}
    if sizes != {"weight": num_heads, "bias": 1}:
        raise InputDataError(
            f"{source.path} has a contact head for other than the {num_heads} heads that its "
            "settings say; get both again from one place"
        )
    check_numbers(source.path, {f"contact_head.{part}": value for part, value in parts.items()})
    return ContactHead(parts["weight"].flatten().tolist(), parts["bias"].item())


def _hugging_face_config(source: Source) -> ModelConfig:
    if source.settings.get("vocab_size") == _SAPROT:
        raise InputDataError(
            f"{source.path} is a SaProt: its {_SAPROT} tokens are pairs of a residue and a "
            "structural letter, which protlm does not support; give an ESM-2 model"
        )
    for key in ("is_folding_model", "is_decoder", "add_cross_attention"):
        source.choice(key, False, (False,))
    source.choice("esmfold_config", None, (None,))
    source.choice("vocab_list", None, (None,))
    for key, number in (("vocab_size", len(VOCABULARY)), ("pad_token_id", VOCABULARY.pad)):
        source.choice(key, number, (number,))
    source.choice("mask_token_id", VOCABULARY.mask, (VOCABULARY.mask,))
    for key, number in (("cls_token_id", VOCABULARY.cls), ("eos_token_id", VOCABULARY.eos)):
        source.choice(key, number, (number, None))
    source.choice("rope_theta", 10_000, (10_000, 10_000.0))
    source.choice("rope_scaling", None, (None,))
    source.choice("rope_parameters", None, (None, _ROPE))
    kind = source.choice("position_embedding_type", "absolute", ("rotary", "absolute"))
    return ModelConfig(
        **SHARED,
        num_layers=source.number("num_hidden_layers"),
        num_heads=source.number("num_attention_heads"),
        model_dim=source.number("hidden_size"),
        feedforward_dim=source.number("intermediate_size"),
        max_length=source.number("max_position_embeddings") - OFFSET,
        positions=Positions.rotary if kind == "rotary" else Positions.learned,
        norm_epsilon=source.fraction("layer_norm_eps", 1e-12),
        embedding_norm=bool(source.choice("emb_layer_norm_before", False, (True, False, None))),
        token_dropout=bool(source.choice("token_dropout", False, (True, False, None))),
    )


def _from_fair_esm(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    prefix = re.compile(r"(encoder\.)?(sentence_encoder\.)?")
    tensors = {prefix.sub("", name, count=1): value for name, value in source.tensors.items()}
    tensors = without(tensors, r"contact_head\..*")
    tensors, frequency = _without_frequencies(source, tensors)
    without_copy(source.path, tensors, "lm_head.weight", "embed_tokens.weight")
    is_rotary, has_norm = _POSITIONS not in tensors, "emb_layer_norm_before.weight" in tensors
    if is_rotary is (frequency is None):
        raise InputDataError(
            f"{source.path} must have either the frequencies of ESM-2's rotary positions or the "
            "table of positions of ESM-1b"
        )
    names = {"embedding.weight": "embed_tokens.weight", "head.bias": "lm_head.bias"}
    names |= modules("", {**HEAD, "final_norm": "emb_layer_norm_after"})
    names |= modules("", {"embedding_norm": "emb_layer_norm_before"}) if has_norm else {}
    names |= {} if is_rotary else {"positions.table": _POSITIONS}
    weights = renamed(source.path, tensors, names | layers("layers.", LAYER, tensors))
    if frequency is None:
        _as_fair_esm_loads_esm_1b(source, weights)
    else:
        weights["rotary.frequency"] = frequency
    config = ModelConfig(
        **SHARED,
        num_layers=source.number("encoder_layers"),
        num_heads=source.number("encoder_attention_heads"),
        model_dim=source.number("encoder_embed_dim"),
        feedforward_dim=weights.get("blocks.0.feedforward.up.bias", torch.empty(1)).numel(),
        max_length=1024 if is_rotary else len(weights["positions.table"]),
        positions=Positions.rotary if is_rotary else Positions.learned,
        norm_epsilon=_EPSILON,
        embedding_norm=has_norm,
        token_dropout=source.choice("token_dropout", is_rotary, (True, False)),
        stored_frequencies=is_rotary,
    )
    return config, weights


def _as_fair_esm_loads_esm_1b(source: Source, weights: dict[str, Tensor]) -> None:
    """Removes the positions that no token has, and makes the embedding of `<mask>` zero."""
    shapes = {"embedding.weight": (len(VOCABULARY), None), "positions.table": (None, None)}
    check_shapes(source.path, weights, shapes)
    weights["positions.table"] = weights["positions.table"][OFFSET:]
    weights["embedding.weight"] = weights["embedding.weight"].clone()
    weights["embedding.weight"][VOCABULARY.mask] = 0


def _without_frequencies(
    source: Source, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Separates the rotary frequencies, one copy for each layer or one for all."""
    copies = {name: v for name, v in tensors.items() if _FREQUENCY.fullmatch(name)}
    check_numbers(source.path, copies)
    found = list(copies.values())
    if any(not value.equal(found[0]) for value in found):
        raise InputDataError(f"{source.path} has other rotary frequencies in each layer")
    rest = {name: value for name, value in tensors.items() if name not in copies}
    return rest, found[0].double() if found else None
