"""Models with the architecture of ESM as `EsmForMaskedLM` of Hugging Face transformers."""

from typing import Any

import torch
from torch import Tensor

from protlm.checkpoints.description import ModelDescription, differences
from protlm.checkpoints.format import Checkpoint
from protlm.config import ModelConfig, Objective, Positions
from protlm.data.vocabulary import VOCABULARY
from protlm.interop.base import ContactHead
from protlm.interop.esm import (
    HF_CONTACTS,
    HF_LAYERS,
    HF_POSITIONS,
    OFFSET,
    SHARED,
    hugging_face_names,
)
from protlm.model.positions import Rotary

_FREQUENCY = "attention.self.rotary_embeddings.inv_freq"
# The epsilon of LayerNorm if the setting is null.
_EPSILON = 1e-5


def is_esm(description: ModelDescription) -> bool:
    """Whether a model computes what an `EsmForMaskedLM` does, for some values of its settings."""
    config = description.model
    same = ModelConfig(
        **SHARED,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        model_dim=config.model_dim,
        feedforward_dim=config.feedforward_dim,
        max_length=config.max_length,
        positions=config.positions,
        norm_epsilon=config.norm_epsilon,
        embedding_norm=config.embedding_norm,
        token_dropout=config.token_dropout,
        stored_frequencies=config.stored_frequencies,
    )
    return (
        description.attention == "softmax"
        and description.objective is Objective.masked
        and config.positions in (Positions.rotary, Positions.learned)
        and not differences(config, same)
    )


def to_esm(
    model: Checkpoint, contacts: ContactHead | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the settings and the tensors of an `EsmForMaskedLM`.

    Frequencies of rotary positions are written for each layer, as in released models.

    Args:
        model: one for which `is_esm` is true.
        contacts: its contact head.
    """
    config, weights = model.description.model, dict(model.weights)
    prefixes = [f"{HF_LAYERS}{number}." for number in range(config.num_layers)]
    frequency = weights.pop("rotary.frequency", None)
    names = hugging_face_names(config, prefixes)
    tensors = {names[name]: value for name, value in weights.items()}
    if config.positions is Positions.learned:
        table_LD = tensors[HF_POSITIONS]
        unused = table_LD.new_zeros(OFFSET, config.model_dim)
        tensors[HF_POSITIONS] = torch.cat([unused, table_LD])
    else:
        if frequency is None:
            frequency = Rotary(head_dim=config.model_dim // config.num_heads).frequency
        tensors |= {f"{prefix}{_FREQUENCY}": frequency.float() for prefix in prefixes}
    if contacts is not None:
        tensors[f"{HF_CONTACTS}.weight"] = torch.tensor([contacts.weights])
        tensors[f"{HF_CONTACTS}.bias"] = torch.tensor([contacts.intercept])
    return _settings(config), tensors


def _settings(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "esm",
        "architectures": ["EsmForMaskedLM"],
        "dtype": "float32",
        "vocab_size": len(VOCABULARY),
        "pad_token_id": VOCABULARY.pad,
        "mask_token_id": VOCABULARY.mask,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.feedforward_dim,
        "max_position_embeddings": config.max_length + OFFSET,
        "position_embedding_type": (
            "rotary" if config.positions is Positions.rotary else "absolute"
        ),
        "layer_norm_eps": config.norm_epsilon or _EPSILON,
        "emb_layer_norm_before": config.embedding_norm,
        "token_dropout": config.token_dropout,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "is_folding_model": False,
        "esmfold_config": None,
        "vocab_list": None,
        "tie_word_embeddings": True,
    }
