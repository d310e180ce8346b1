"""T5 encoders over residues in the format of Hugging Face: ProtT5, ProstT5, Ankh and IgT5.

T5: arXiv 1910.10683. `tokenizer.json` or `spiece.model` gives the alphabet. The decoder and the
output layer are left out. T5 does not divide logits by √K, which is a factor of the query matrices
here, and a feed-forward without a gate has biases of 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from protlm.attention.ops.numerics import accum_dtype
from protlm.config import Activation, Frame, ModelConfig, Norm, Positions
from protlm.data.vocabulary import VOCABULARY
from protlm.interop.base import Family, ForeignModel, num_rows
from protlm.interop.layout import Layout
from protlm.interop.source import Source

_KINDS = {"relu": Activation.relu, "gated-gelu": Activation.geglu, "gated-silu": Activation.swiglu}
_BUCKETS, _DISTANCE = "relative_attention_num_buckets", "relative_attention_max_distance"
# What precedes the residues of ProstT5 and Ankh 3.
_PREFIXES = ("<AA2fold>", "[NLU]")
_PLAIN = {"feedforward.{up,down}.weight": "layer.1.DenseReluDense.{wi,wo}.weight"}
_GATED = {"feedforward.{gate,up,down}.weight": "layer.1.DenseReluDense.{wi_0,wi_1,wo}.weight"}


@final
class T5(Family):
    """Encoders of T5."""

    layout = Layout(
        names={
            "embedding.weight": "shared.weight",
            "relative.table": (
                "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            ),
            "final_norm.weight": "encoder.final_layer_norm.weight",
        },
        layers="encoder.block.",
        layer={
            "{attention,feedforward}_norm.weight": "layer.{0,1}.layer_norm.weight",
            "attention.{query,key,value,output}.weight": "layer.0.SelfAttention.{q,k,v,o}.weight",
        },
        sizes={
            **{"num_layers": "num_layers", "num_heads": "num_heads", "model_dim": "d_model"},
            **{"head_dim": "d_kv", "feedforward_dim": "d_ff"},
            **{"relative_buckets": _BUCKETS, "relative_distance": _DISTANCE},
        },
        epsilon=("layer_norm_epsilon", 1e-6),
        copies={"encoder.embed_tokens.weight": "shared.weight"},
    )
    fixed = {"max_length": 512, "positions": Positions.relative, "norm": Norm.rms}
    # No tensor is part of an output layer.
    output_layer, anchor = "(?!)", "shared.weight"
    other_heads = r"(classifier|score|decoder|lm_head)\..*"
    special = ("<unk>", "<pad>", "</s>", "<unk>", "<unk>")
    # Masked spans, structural letters and other tasks.
    left_out = (r"<.*>", r"\[.*\]", "[a-z]", "")
    spare_rows = True
    # ProtT5, ProstT5 and IgT5 have a width of 1024.
    licenses = dict.fromkeys((768, 1536, 2560), "Ankh is under CC BY-NC-SA 4.0, not commercial use")

    def translate(self, source: Source) -> ForeignModel:
        found = super().translate(source)
        weights, config = found.weights, found.description.model
        for name in [name for name in weights if name.endswith(".query.weight")]:
            scaled = weights[name].double() * math.sqrt(config.width_of_head)
            weights[name] = scaled.to(accum_dtype(weights[name]))
        for number in range(config.num_layers) if config.activation is Activation.relu else ():
            name = f"blocks.{number}.feedforward"
            weights[f"{name}.up.bias"] = torch.zeros(config.feedforward_dim)
            weights[f"{name}.down.bias"] = torch.zeros(config.model_dim)
        return found

    def layout_of(self, source: Source) -> Layout:
        is_plain = source.choice("feed_forward_proj", tuple(_KINDS)) == "relu"
        return replace(self.layout, layer={**self.layout.layer, **(_PLAIN if is_plain else _GATED)})

    def config(self, source: Source, layout: Layout, weights: Mapping[str, Tensor]) -> ModelConfig:
        sizes = {_BUCKETS: num_rows(source, weights, "relative.table"), _DISTANCE: 128}
        source = replace(source, settings={**sizes, **source.settings})
        activation = _KINDS[source.choice("feed_forward_proj", tuple(_KINDS))]
        return replace(super().config(source, layout, weights), activation=activation)

    def tokens(self, path: Path, alphabet: Sequence[str]) -> list[int]:
        """Reads U, Z, O and B as X where pieces have marks, as users of ProtT5 do."""
        before = tuple(token for token in _PREFIXES if token in alphabet)
        self.frame = Frame(before, ("<eos>",), before, has_mask=False)
        plain = [piece.removeprefix("▁") for piece in alphabet]
        numbers = super().tokens(path, plain)
        for letter in "UZOB" if plain != alphabet else ():
            numbers[VOCABULARY[letter]] = numbers[VOCABULARY["X"]]
        return numbers
