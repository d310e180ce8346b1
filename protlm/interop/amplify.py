"""AMPLIFY in the format of Hugging Face (doi:10.1101/2024.09.23.614603).

Its rotary positions pair neighboring coordinates; rows of the projections to queries and keys are
reordered for protlm's, which pair a coordinate with the one half a head away. `tokenizer.json` or
`vocab.txt` gives the alphabet.
"""

from typing import final

from torch import Tensor

from protlm.config import Activation, ModelConfig, Norm, Positions
from protlm.interop.alphabet import gather_rows, read_folder_alphabet, source_tokens
from protlm.interop.base import (
    Family,
    Translated,
    check_shapes,
    layers,
    modules,
    renamed,
    with_parts,
    without,
)
from protlm.interop.source import Source

_LAYER = {
    "attention_norm": "attention_norm",
    "attention.query": "q",
    "attention.key": "k",
    "attention.value": "v",
    "attention.output": "wo",
    "feedforward_norm": "ffn_norm",
    "feedforward.gate": "ffn.w1",
    "feedforward.up": "ffn.w2",
    "feedforward.down": "ffn.w3",
}
_SPECIAL = {
    "<cls>": "<bos>",
    "<pad>": "<pad>",
    "<eos>": "<eos>",
    "<unk>": "<unk>",
    "<mask>": "<mask>",
}
# The chain break, and the letter for leucine or isoleucine, which protlm reads as X.
_LEFT_OUT = ("|", "J")


@final
class Amplify(Family):
    """AMPLIFY."""

    def translate(self, source: Source) -> Translated:
        path = source.path
        tensors = without(source.tensors, r"freqs_cis")
        tensors = with_parts(path, tensors, "ffn.w12.weight", ("ffn.w1.weight", "ffn.w2.weight"))
        names = {"embedding.weight": "encoder.weight", "final_norm.weight": "layer_norm_2.weight"}
        names |= modules("", {"head": "decoder"})
        names |= layers("transformer_encoder.", _LAYER, tensors, parts=("weight",))
        weights = renamed(path, tensors, names)
        config = _config(source, weights)
        alphabet = read_folder_alphabet(path)
        rows = (len(alphabet), config.model_dim)
        shapes = {"embedding.weight": rows, "head.weight": rows, "head.bias": rows[:1]}
        square = (config.model_dim, config.model_dim)
        turned = [name for name in weights if name.endswith((".query.weight", ".key.weight"))]
        check_shapes(path, weights, shapes | dict.fromkeys(turned, square))
        tokens = source_tokens(path, alphabet, _SPECIAL, {}, left_out=_LEFT_OUT)
        gather_rows(weights, tokens)
        for name in turned:
            weights[name] = _half_split(weights[name], config.num_heads)
        return Translated(config, weights)


def _config(source: Source, weights: dict[str, Tensor]) -> ModelConfig:
    for key, value in (
        ("rms_norm", True),
        ("layer_norm_after_embedding", False),
        ("layer_norm_before_last_layer", True),
        ("ffn_bias", False),
        ("att_bias", False),
    ):
        source.choice(key, value, (value,))
    source.choice("hidden_act", "SwiGLU", ("SwiGLU", "swiglu"))
    up = weights.get("blocks.0.feedforward.up.weight")
    return ModelConfig(
        num_layers=source.number("num_hidden_layers"),
        num_heads=source.number("num_attention_heads"),
        model_dim=source.number("hidden_size"),
        feedforward_dim=1 if up is None else len(up),
        max_length=source.number("max_length"),
        positions=Positions.rotary,
        norm=Norm.rms,
        norm_epsilon=source.fraction("norm_eps", 1e-5),
        activation=Activation.swiglu,
    )


def _half_split(weight: Tensor, num_heads: int) -> Tensor:
    """Returns a projection whose coordinates 2i and 2i + 1 of each head are i and i + K/2."""
    pairs = weight.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()
