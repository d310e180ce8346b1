"""RoBERTa over residues with fairseq's names, such as Sapiens (doi:10.1080/19420862.2021.2020203).

RoBERTa: arXiv 1907.11692. A `.safetensors` file, and beside it a `.json` file with `alphabet`,
`special_tokens` and `architecture`.
"""

import re
from dataclasses import replace
from typing import Any, final

from protlm.config import Activation, HeadKind, ModelConfig, NormOrder, Positions
from protlm.interop.alphabet import gather_rows, source_tokens
from protlm.interop.base import (
    Family,
    Translated,
    check_shapes,
    layers,
    modules,
    renamed,
    without_copy,
)
from protlm.interop.fairseq import HEAD, LAYER
from protlm.interop.source import Source
from protlm.system.errors import InputDataError

_PREFIX = re.compile(r"(decoder|encoder)\.(sentence_encoder\.)?")
_SPECIAL = {"<cls>": "<s>", "<pad>": "<pad>", "<eos>": "</s>", "<unk>": "<unk>", "<mask>": "<mask>"}
_EPSILON = 1e-5


@final
class Roberta(Family):
    """RoBERTa with fairseq's names."""

    def translate(self, source: Source) -> Translated:
        if source.path.is_dir():
            raise InputDataError(
                f"{source.path} is a RoBERTa folder of Hugging Face; protlm reads RoBERTa only in "
                "fairseq's layout, as that of Sapiens: give NAME.safetensors with NAME.json beside "
                "it"
            )
        alphabet = source.settings.get("alphabet")
        if not isinstance(alphabet, list) or not all(isinstance(t, str) for t in alphabet):
            raise InputDataError(f"{source.path}: the alphabet must be a list of tokens")
        tokens = source_tokens(source.path, alphabet, _SPECIAL, _unknown_residue(alphabet))
        tensors = {_PREFIX.sub("", name, count=1): v for name, v in source.tensors.items()}
        without_copy(source.path, tensors, "lm_head.weight", "embed_tokens.weight")
        names = {
            "embedding.weight": "embed_tokens.weight",
            "positions.table": "embed_positions.weight",
            "head.bias": "lm_head.bias",
        }
        names |= modules("", {**HEAD, "embedding_norm": "emb_layer_norm"})
        names |= layers("layers.", LAYER, tensors)
        weights = renamed(source.path, tensors, names)
        check_shapes(source.path, weights, {"positions.table": (None, None)})
        # Rows up to that of padding belong to no position.
        first = alphabet.index(_SPECIAL["<pad>"]) + 1
        weights["positions.table"] = weights["positions.table"][first:]
        config = _config(source, len(weights["positions.table"]))
        shapes = {
            "embedding.weight": (len(alphabet), config.model_dim),
            "head.bias": (len(alphabet),),
        }
        check_shapes(source.path, weights, shapes)
        gather_rows(weights, tokens)
        return Translated(config, weights)


def _unknown_residue(alphabet: list[Any]) -> dict[str, str]:
    """Sapiens reads X as `<mask>`, a residue to be predicted."""
    return {} if "X" in alphabet else {"X": _SPECIAL["<mask>"]}


def _config(source: Source, max_length: int) -> ModelConfig:
    sizes = replace(source, settings=source.settings["architecture"])
    sizes.choice("activation", "gelu", ("gelu", "gelu (exact, erf)"))
    return ModelConfig(
        num_layers=sizes.number("layers"),
        num_heads=sizes.number("heads"),
        model_dim=sizes.number("model_width"),
        feedforward_dim=sizes.number("feed_forward_width"),
        max_length=max_length,
        positions=Positions.learned,
        norm_order=NormOrder.post,
        norm_epsilon=sizes.fraction("layer_norm_epsilon", _EPSILON),
        activation=Activation.gelu,
        attention_bias=True,
        embedding_norm=True,
        head=HeadKind.dense_norm,
        tied_head=True,
    )
