"""BERT over residues, such as AntiBERTy and ProtBert, in the format of Hugging Face.

BERT: arXiv 1810.04805. `vocab.txt` gives the alphabet. The embedding of the first token type is
part of that of the positions. The pooler and heads of other tasks are left out.
"""

from typing import final

from torch import Tensor

from protlm.config import Activation, HeadKind, ModelConfig, NormOrder, Positions
from protlm.interop.alphabet import ALPHABET, TOKENIZER, gather_rows, read_alphabet, source_tokens
from protlm.interop.base import (
    Family,
    Translated,
    check_shapes,
    layers,
    modules,
    renamed,
    with_modern_names,
    without,
    without_copy,
    without_output_matrix,
)
from protlm.interop.source import Source
from protlm.system.errors import InputDataError

_LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "feedforward_norm": "output.LayerNorm",
}
_TOP = {
    "embedding_norm": "bert.embeddings.LayerNorm",
    "head_transform.dense": "cls.predictions.transform.dense",
    "head_transform.norm": "cls.predictions.transform.LayerNorm",
}
_EMBEDDING = "bert.embeddings.word_embeddings.weight"
_TYPES = "bert.embeddings.token_type_embeddings.weight"
_UNUSED = (
    r"bert\.(embeddings\.position_ids|pooler\..*)|cls\.(seq_relationship|species|chain|graft)\..*"
)
_SPECIAL = {
    "<cls>": "[CLS]",
    "<pad>": "[PAD]",
    "<eos>": "[SEP]",
    "<unk>": "[UNK]",
    "<mask>": "[MASK]",
}
# ProtBert was trained with X in place of these.
_RARE = "UZOB"


@final
class Bert(Family):
    """BERT."""

    def translate(self, source: Source) -> Translated:
        config = _config(source)
        tensors = without(with_modern_names(source.tensors), _UNUSED)
        without_output_matrix(source, tensors, "cls.predictions.decoder.weight", _EMBEDDING)
        without_copy(source.path, tensors, "cls.predictions.decoder.bias", "cls.predictions.bias")
        names = {
            "embedding.weight": _EMBEDDING,
            "positions.table": "bert.embeddings.position_embeddings.weight",
            "types": _TYPES,
            "head.bias": "cls.predictions.bias",
        }
        names |= modules("", _TOP) | layers("bert.encoder.layer.", _LAYER, tensors)
        weights = renamed(source.path, tensors, names)
        file, folder = source.path / ALPHABET, source.path
        if (folder / TOKENIZER).is_file() and not file.is_file():
            raise InputDataError(
                f"{file} is missing, and protlm needs it; transformers 5 writes only {TOKENIZER}: "
                'type: python -c "from tokenizers import Tokenizer; '
                f"Tokenizer.from_file('{folder / TOKENIZER}').model.save('{folder}')\""
            )
        alphabet = read_alphabet(file)
        rare = dict.fromkeys(_RARE, "X") if "X" in alphabet else {}
        tokens = source_tokens(source.path, alphabet, _SPECIAL, rare)
        for key, token in (("cls_token_id", "<cls>"), ("eos_token_id", "<eos>")):
            number = alphabet.index(_SPECIAL[token])
            source.choice(key, number, (number, None))
        width = config.model_dim
        shapes = {
            "embedding.weight": (len(alphabet), width),
            "head.bias": (len(alphabet),),
            "positions.table": (config.max_length, width),
            "types": (None, width),
        }
        check_shapes(source.path, weights, shapes)
        weights["positions.table"] = _with_first_type(weights.pop("types"), weights)
        gather_rows(weights, tokens)
        return Translated(config, weights)


def _config(source: Source) -> ModelConfig:
    for key in ("is_decoder", "add_cross_attention"):
        source.choice(key, False, (False,))
    source.choice("hidden_act", "gelu", ("gelu",))
    source.choice("position_embedding_type", "absolute", ("absolute",))
    return ModelConfig(
        num_layers=source.number("num_hidden_layers"),
        num_heads=source.number("num_attention_heads"),
        model_dim=source.number("hidden_size"),
        feedforward_dim=source.number("intermediate_size"),
        max_length=source.number("max_position_embeddings"),
        positions=Positions.learned,
        norm_order=NormOrder.post,
        norm_epsilon=source.fraction("layer_norm_eps", 1e-12),
        activation=Activation.gelu,
        attention_bias=True,
        embedding_norm=True,
        head=HeadKind.dense_norm,
        tied_head=True,
    )


def _with_first_type(types_TD: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Returns the table of positions, to which the only token type that is used is added."""
    table_LD = weights["positions.table"]
    return (table_LD.double() + types_TD[0].double()).to(table_LD.dtype)
