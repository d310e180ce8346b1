"""E1 (doi:10.1101/2025.11.12.688125), with or without relatives.

Its code has its alphabet, which has no unknown token. A protein is between `<bos> 1` and `2 <eos>`.
Each n-th layer sees the proteins before it as well, with another rotary base and with positions
that run on, and a table of the numbers of proteins is added to the embedding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from string import ascii_uppercase
from typing import final

from torch import Tensor

from protlm.config import Frame, HeadKind, ModelConfig, Relatives, RelativesPositions
from protlm.interop.amplify import Amplify
from protlm.interop.base import Family, check_shapes, num_rows
from protlm.interop.layout import HUGGING_FACE, Layout
from protlm.interop.source import Source


@final
class E1(Family):
    """E1."""

    layout = Layout(
        names={
            "embedding.weight": "model.embed_tokens.weight",
            "family_numbers": "model.embed_seq_id.weight",
            "final_norm.weight": "model.norm.weight",
            "head_transform.{dense,norm}.*": "mlm_head.{0,2}.*",
            "head.*": "mlm_head.3.*",
        },
        layers="model.layers.",
        layer={
            "{attention,feedforward}_norm.weight": (
                "norm_attn_norm.{input,post_attention}_layernorm.weight"
            ),
            "attention.{query,key,value,output}.weight": (
                "norm_attn_norm.self_attn.{q,k,v,o}_proj.weight"
            ),
            "feedforward.{gate,up,down}.weight": "ffn.mlp.{w1,w3,w2}.weight",
        },
        sizes={
            **HUGGING_FACE,
            "max_length": "max_num_positions_within_seq",
            "global_every": "global_attention_every_n_layers",
            "global_base": "rope_theta_global",
            "qkv_clip": "clip_qkv",
        },
        epsilon=("rms_norm_eps", 1e-5),
    )
    fixed = {**Amplify.fixed, "head": HeadKind.dense_layer_norm}
    allowed = {
        "gated_mlp": (True,),
        "hidden_act": ("silu",),
        "rope_theta_within_seq": (10_000, 10_000.0),
        "tie_word_embeddings": (False,),
    }
    output_layer, encoder, anchor = "mlm_head.", "model.", "embed_tokens.weight"
    frame = Frame(("<cls>", "1"), ("2", "<eos>"), ("1", "2"))
    special = ("<bos>", "<pad>", "<eos>", "X", "?")
    left_out = ("<bos_glm>", "<eos_span>", "J")
    licenses = {None: "E1 has the Profluent-E1 Clickthrough License, also on the use of its name"}

    def alphabet(self, source: Source) -> Sequence[str]:
        return (
            *("<pad>", "<bos>", "<eos>", "<bos_glm>", "<eos_span>", "?", "1", "2"),
            *ascii_uppercase,
        )

    def config(self, source: Source, layout: Layout, weights: Mapping[str, Tensor]) -> ModelConfig:
        found = super().config(source, layout, weights)
        check_shapes(source.path, weights, {"family_numbers": (None, found.model_dim)})
        return replace(
            found,
            relatives=Relatives.ordered,
            relatives_every=found.global_every,
            relatives_positions=RelativesPositions.run,
            relatives_numbers=num_rows(source, weights, "family_numbers"),
        )
