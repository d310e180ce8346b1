"""ESM C: the file of its library, and both layouts of Hugging Face folders.

The architecture is that of ESM-3 (doi:10.1126/science.ads0018) without structure. The vocabulary is
that of ESM-2, with a chain break in place of `<null_1>`; further rows of the embedding and the
output layer, which belong to no token, are left out. The divisor of residuals, √(N/36), is part of
the output matrices of the sublayers here, and the final norm has a bias of 0.
"""

import math
import re
from typing import final

import torch
from torch import Tensor

from protlm.config import Activation, HeadKind, ModelConfig, Positions, QueryKeyWidth
from protlm.data.vocabulary import VOCABULARY
from protlm.interop.base import (
    Family,
    Translated,
    check_shapes,
    check_sizes,
    layers,
    modules,
    renamed,
    with_parts,
    without,
)
from protlm.interop.source import Source
from protlm.system.errors import InputDataError

# From the layout with fused kernels to that of the library.
_FUSED = (
    (r"^esmc\.", ""),
    (r"^lm_head\.", "sequence_head."),
    (r"attn\.layernorm_qkv\.layer_norm_", "attn.layernorm_qkv.0."),
    (r"attn\.layernorm_qkv\.weight$", "attn.layernorm_qkv.1.weight"),
    (r"ffn\.layer_norm_", "ffn.0."),
    (r"ffn\.fc1_weight$", "ffn.1.weight"),
    (r"ffn\.fc2_weight$", "ffn.3.weight"),
)
_LIBRARY_NORMS = {"attention_norm": "attn.layernorm_qkv.0", "feedforward_norm": "ffn.0"}
_LIBRARY = {
    "attention.query": "attn.q",
    "attention.key": "attn.k",
    "attention.value": "attn.v",
    "attention.query_norm": "attn.q_ln",
    "attention.key_norm": "attn.k_ln",
    "attention.output": "attn.out_proj",
    "feedforward.gate": "ffn.gate",
    "feedforward.up": "ffn.up",
    "feedforward.down": "ffn.3",
}
_LIBRARY_HEAD = {
    "head_transform.dense": "sequence_head.0",
    "head_transform.norm": "sequence_head.2",
    "head": "sequence_head.3",
}
_NATIVE_NORMS = {
    "attention_norm": "input_layernorm",
    "feedforward_norm": "post_attention_layernorm",
}
_NATIVE = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
}
_NATIVE_HEAD = {
    "head_transform.dense": "lm_head.dense",
    "head_transform.norm": "lm_head.layer_norm",
    "head": "lm_head.decoder",
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# The width of a head in all released models, where the file does not tell it.
_HEAD = 64
# The number of layers whose residual is not scaled.
_UNSCALED = 36
_EPSILON = 1e-5
# By the width of the model: its name, and the license of its first release.
_LICENSES = {
    960: ("300M", "Cambrian Open License"),
    1152: ("600M", "Cambrian Non-Commercial License"),
}


@final
class Esmc(Family):
    """ESM C."""

    def translate(self, source: Source) -> Translated:
        is_native = any(name.startswith("esmc.layers.") for name in source.tensors)
        tensors, names = _native(source) if is_native else _of_the_library(source)
        weights = renamed(source.path, tensors, names)
        config = _config(source, weights)
        vocab_size, width = len(VOCABULARY), config.model_dim
        rows = len(weights["embedding.weight"])
        shapes = {"head.weight": (rows, width), "head.bias": (rows,), "final_norm.weight": (width,)}
        check_shapes(source.path, weights, shapes)
        check_sizes(source.path, config, weights)
        if rows < vocab_size:
            raise InputDataError(
                f"{source.path} has {rows} tokens, fewer than ESM-2's {vocab_size}"
            )
        for name in ("embedding.weight", "head.weight", "head.bias"):
            weights[name] = weights[name][:vocab_size].clone()
        weights["final_norm.bias"] = torch.zeros_like(weights["final_norm.weight"])
        _divide_residuals(weights, math.sqrt(config.num_layers / _UNSCALED))
        return Translated(config, weights, license=_license(width))


def _license(width: int) -> str | None:
    if width not in _LICENSES:
        return None
    size, first = _LICENSES[width]
    return (
        f"ESM C {size} was published by EvolutionaryScale under the {first}, and later by Biohub "
        "under the MIT License; the terms that came with this copy apply"
    )


def _native(source: Source) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors of transformers' own class, and their names, ours to theirs."""
    tensors = without(source.tensors, r".*\.rotary_emb\.(original_)?inv_freq")
    names = {
        "embedding.weight": "esmc.embed_tokens.weight",
        "final_norm.weight": "esmc.norm.weight",
    }
    names |= modules("", _NATIVE_HEAD) | layers("esmc.layers.", _NATIVE_NORMS, tensors)
    return tensors, names | layers("esmc.layers.", _NATIVE, tensors, parts=("weight",))


def _of_the_library(source: Source) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors of the library or of fused kernels, likewise."""
    tensors: dict[str, Tensor] = {}
    for name, value in without(source.tensors, r".*\._extra_state").items():
        new = name
        for pattern, replacement in _FUSED:
            new = re.sub(pattern, replacement, new)
        if new in tensors:
            raise InputDataError(f"{source.path} has {new!r:.90} in two layouts")
        tensors[new] = value
    for fused, parts in (
        ("attn.layernorm_qkv.1.weight", ("attn.q.weight", "attn.k.weight", "attn.v.weight")),
        ("ffn.1.weight", ("ffn.gate.weight", "ffn.up.weight")),
    ):
        tensors = with_parts(source.path, tensors, fused, parts)
    names = {"embedding.weight": "embed.weight", "final_norm.weight": "transformer.norm.weight"}
    names |= modules("", _LIBRARY_HEAD) | layers("transformer.blocks.", _LIBRARY_NORMS, tensors)
    return tensors, names | layers("transformer.blocks.", _LIBRARY, tensors, parts=("weight",))


def _config(source: Source, weights: dict[str, Tensor]) -> ModelConfig:
    for key in ("attention_bias", "mlp_bias"):
        source.choice(key, False, (False,))
    source.choice("hidden_act", "silu", ("silu",))
    source.choice("rope_theta", 10_000, (10_000, 10_000.0))
    source.choice("rope_scaling", None, (None,))
    source.choice("rope_parameters", None, (None, _ROPE))
    check_shapes(source.path, weights, {"embedding.weight": (None, None)})
    width = weights["embedding.weight"].shape[1]
    if source.settings.get("hidden_size", width) != width:
        raise InputDataError(
            f"{source.path} has weights of width {width}, and its settings say "
            f"{source.settings['hidden_size']!r:.40}; get both again from one place"
        )
    heads = width // _HEAD
    if "num_attention_heads" in source.settings:
        heads = source.number("num_attention_heads")
    if not heads or width % heads:
        raise InputDataError(f"{source.path}: a width of {width} cannot have heads of {_HEAD}")
    gate = weights.get("blocks.0.feedforward.gate.weight")
    if gate is None:
        raise InputDataError(f"{source.path} has no layers")
    num_layers = sum(name.endswith(".feedforward.gate.weight") for name in weights)
    if "num_hidden_layers" in source.settings:
        num_layers = source.number("num_hidden_layers")
    return ModelConfig(
        num_layers=num_layers,
        num_heads=heads,
        model_dim=width,
        feedforward_dim=len(gate),
        max_length=2048,
        positions=Positions.rotary,
        norm_epsilon=_EPSILON,
        activation=Activation.swiglu,
        qk_norm=True,
        qk_norm_width=QueryKeyWidth.layer,
        head=HeadKind.dense_norm,
    )


def _divide_residuals(weights: dict[str, Tensor], divisor: float) -> None:
    for name, value in weights.items():
        if name.endswith((".attention.output.weight", ".feedforward.down.weight")):
            weights[name] = (value.double() / divisor).to(value.dtype)
