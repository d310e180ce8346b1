"""AbLang, a model of antibody chains (doi:10.1093/bioadv/vbac046), in the folder of its library.

`hparams.json` describes it, `vocab.json` gives the alphabet, `amodel.pt` has the weights. Residues
that it lacks are read as its mask. The first row of its table of positions is that of padding.
"""

from typing import final

from protlm.config import Activation, HeadKind, ModelConfig, NormOrder, Positions
from protlm.interop.alphabet import gather_rows, read_numbers, source_tokens
from protlm.interop.base import (
    Family,
    Translated,
    check_shapes,
    layers,
    modules,
    renamed,
    without_copy,
)
from protlm.interop.source import Source

_EMBEDDINGS = "AbRep.AbEmbeddings"
_LAYER = {
    "attention.query": "MultiHeadAttention.Attention.q_proj",
    "attention.key": "MultiHeadAttention.Attention.k_proj",
    "attention.value": "MultiHeadAttention.Attention.v_proj",
    "attention.output": "MultiHeadAttention.Attention.out_proj",
    "attention_norm": "MHALayerNorm",
    "feedforward.up": "IntermediateLayer.expand_dense",
    "feedforward.down": "IntermediateLayer.dense_dense",
    "feedforward_norm": "IntermediateLayer.LayerNorm",
}
_TOP = {
    "embedding_norm": f"{_EMBEDDINGS}.LayerNorm",
    "head_transform.dense": "AbHead.dense",
    "head_transform.norm": "AbHead.layer_norm",
}
_SPECIAL = {"<cls>": "<", "<pad>": "-", "<eos>": ">", "<unk>": "*", "<mask>": "*"}


@final
class Ablang(Family):
    """AbLang for heavy or light chains."""

    def translate(self, source: Source) -> Translated:
        tensors = dict(source.tensors)
        without_copy(source.path, tensors, "AbHead.decoder.bias", "AbHead.bias")
        names = {
            "embedding.weight": f"{_EMBEDDINGS}.AAEmbeddings.weight",
            "positions.table": f"{_EMBEDDINGS}.PositionEmbeddings.weight",
            "head.weight": "AbHead.decoder.weight",
            "head.bias": "AbHead.bias",
        }
        names |= modules("", _TOP) | layers("AbRep.EncoderBlocks.Layers.", _LAYER, tensors)
        weights = renamed(source.path, tensors, names)
        alphabet = read_numbers(source.path / "vocab.json")
        tokens = source_tokens(source.path, alphabet, _SPECIAL, {})
        source.choice("pad_token_id", alphabet.index("-"), (alphabet.index("-"),))
        config = _config(source)
        rows = (len(alphabet), config.model_dim)
        shapes = {
            "embedding.weight": rows,
            "head.weight": rows,
            "head.bias": rows[:1],
            "positions.table": (config.max_length + 1, config.model_dim),
        }
        check_shapes(source.path, weights, shapes)
        weights["positions.table"] = weights["positions.table"][1:]
        gather_rows(weights, tokens)
        return Translated(config, weights)


def _config(source: Source) -> ModelConfig:
    source.choice("hidden_act", "gelu", ("gelu",))
    return ModelConfig(
        num_layers=source.number("num_hidden_layers"),
        num_heads=source.number("num_attention_heads"),
        model_dim=source.number("hidden_size"),
        feedforward_dim=source.number("intermediate_size"),
        max_length=source.number("max_position_embeddings") - 1,
        positions=Positions.learned,
        norm_order=NormOrder.post,
        norm_epsilon=source.fraction("layer_norm_eps", 1e-12),
        activation=Activation.gelu,
        attention_bias=True,
        embedding_norm=True,
        head=HeadKind.dense_norm,
    )
