"""ESM C: the file of its library, both layouts of Hugging Face folders, and that of NVIDIA BioNeMo.

The architecture is that of ESM-3 (doi:10.1126/science.ads0018) without structure. The vocabulary is
that of ESM-2, with a chain break in place of `<null_1>`; further rows of the embedding and the
output layer, which belong to no token, are left out. The divisor of residuals, √(N/36), is part of
the output matrices of the sublayers here, and the final norm has a bias of 0.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, final

import torch
from torch import Tensor

from protlm.config import Activation, HeadKind, ModelConfig, Positions, QueryKeyWidth
from protlm.interop.base import ROTARY, Family, ForeignModel, check_shapes, num_rows
from protlm.interop.layout import SIZES, Layout
from protlm.interop.source import Source
from protlm.system.errors import InputDataError

# The names of Hugging Face's class; those of the library `esm`, and of its fused kernels, are other
# spellings of them.
_LAYOUT = Layout(
    names={
        "embedding.weight": "esmc.embed_tokens.weight",
        "final_norm.weight": "esmc.norm.weight",
        "head_transform.{dense,norm}.*": "lm_head.{dense,layer_norm}.*",
        "head.*": "lm_head.decoder.*",
    },
    layers="esmc.layers.",
    layer={
        "{attention,feedforward}_norm.*": "{input,post_attention}_layernorm.*",
        "attention.{query,key,value,output}.weight": "self_attn.{q,k,v,o}_proj.weight",
        "attention.{query,key}_norm.weight": "self_attn.{q,k}_norm.weight",
        "feedforward.{gate,up,down}.weight": "mlp.{gate,up,down}_proj.weight",
    },
    sizes=SIZES,
    epsilon=("layer_norm_eps", 1e-5),
    spellings=(
        (r"^(esmc\.)?embed\.", "esmc.embed_tokens."),
        (r"^(esmc\.)?transformer\.norm\.", "esmc.norm."),
        (r"^(esmc\.)?transformer\.blocks\.", "esmc.layers."),
        (r"^sequence_head\.", "lm_head."),
        (r"^lm_head\.0\.", "lm_head.dense."),
        (r"^lm_head\.(2\.|decoder\.layer_norm_)", "lm_head.layer_norm."),
        (r"^lm_head\.3\.", "lm_head.decoder."),
        (r"(\.attn)?\.layernorm_qkv\.(0\.|layer_norm_)", ".input_layernorm."),
        (r"(\.attn)?\.layernorm_qkv\.(1\.)?weight$", ".self_attn.qkv"),
        (r"\.attn\.([qk])_ln\.", r".self_attn.\1_norm."),
        (r"(\d)\.([qk])_norm\.", r"\1.self_attn.\2_norm."),
        (r"(\.attn\.out_|\.)proj\.", ".self_attn.o_proj."),
        (r"\.(ffn|layernorm_mlp)\.(0\.|layer_norm_)", ".post_attention_layernorm."),
        (r"\.(ffn|layernorm_mlp)\.(1\.|fc1_)weight$", ".mlp.gate_up"),
        (r"\.(ffn|layernorm_mlp)\.(3\.|fc2_)weight$", ".mlp.down_proj.weight"),
    ),
    unused=r".*\.(rotary_emb\.(original_)?inv_freq|_extra_state)",
    stacks={
        ".qkv": (".q_proj.weight", ".k_proj.weight", ".v_proj.weight"),
        ".gate_up": (".gate_proj.weight", ".up_proj.weight"),
    },
)
# The width of a head in all released models, which the file of the library does not state.
_HEAD = 64
# The number of layers whose residual is not scaled.
_UNSCALED = 36
_TERMS = (
    "ESM C {} was published by EvolutionaryScale under the {}, and later by Biohub under the MIT "
    "License; the terms that came with this copy apply"
)


class Esmc(Family):
    """ESM C; if it `is_divided`, its output matrices include the divisor of residuals."""

    is_divided: ClassVar[bool] = False
    layout = _LAYOUT
    output_layer, encoder, anchor = "(lm|sequence)_head.", "esmc.", "embed_tokens.weight"
    spare_rows = True
    licenses = {
        960: _TERMS.format("300M", "Cambrian Open License"),
        1152: _TERMS.format("600M", "Cambrian Non-Commercial License"),
    }
    fixed = {
        "max_length": 2048,
        "positions": Positions.rotary,
        "activation": Activation.swiglu,
        "qk_norm": True,
        "qk_norm_width": QueryKeyWidth.layer,
        "head": HeadKind.dense_norm,
    }
    allowed = {**ROTARY, "attention_bias": (False,), "mlp_bias": (False,), "hidden_act": ("silu",)}

    def translate(self, source: Source) -> ForeignModel:
        """Scales the outputs of sublayers."""
        found = super().translate(source)
        weights, described = found.weights, found.description
        check_shapes(source.path, weights, {"final_norm.weight": (described.model.model_dim,)})
        weights.setdefault("final_norm.bias", torch.zeros_like(weights["final_norm.weight"]))
        divisor = 1 if self.is_divided else math.sqrt(described.model.num_layers / _UNSCALED)
        for name, value in weights.items():
            if name.endswith((".attention.output.weight", ".feedforward.down.weight")):
                weights[name] = (value.double() / divisor).to(value.dtype)
        return found

    def config(self, source: Source, layout: Layout, weights: Mapping[str, Tensor]) -> ModelConfig:
        """Reads the sizes from the weights where the settings lack them."""
        num_rows(source, weights, "embedding.weight")
        width = weights["embedding.weight"].shape[1]
        settings = {
            "num_hidden_layers": sum(name.endswith(".gate.weight") for name in weights),
            "num_attention_heads": width // _HEAD,
            "hidden_size": width,
            **source.settings,
        }
        return super().config(replace(source, settings=settings), layout, weights)


@final
class NvEsmc(Esmc):
    """ESM C of BioNeMo for TransformerEngine, all of whose norms have biases."""

    is_divided = True
    layout = replace(_LAYOUT, names={**_LAYOUT.names, "final_norm.bias": "esmc.norm.bias"})

    def translate(self, source: Source) -> ForeignModel:
        """Refuses norms that ESM C does not have, and a first layout, which lost a part of them."""
        biases = {n: v for n, v in source.tensors.items() if re.search(r"\.[qk]_norm\.bias$", n)}
        if any(".self_attention." in name or bool(v.any()) for name, v in biases.items()):
            raise InputDataError(
                f"{source.path} has norms of queries and keys that ESM C does not have: those of "
                "one head, as in the first layout of nv_esmc, or with biases; give a model that a "
                "later BioNeMo converted from ESM C, or the ESM C itself"
            )
        kept = {n: v for n, v in source.tensors.items() if n not in biases}
        return super().translate(replace(source, tensors=kept))
