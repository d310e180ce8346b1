"""A network with new weights, from the settings of a model and of its attention."""

from typing import Any

import torch

from protlm.attention import Attention, create, options_of_layer
from protlm.attention.base import SharesParameters
from protlm.config import ModelConfig
from protlm.data.vocabulary import VOCABULARY
from protlm.model.transformer import ProteinLM


def build_network(model: ModelConfig, attention: dict[str, Any], *, seed: int) -> ProteinLM:
    """Returns a network with new weights, a pure function of the config and the seed."""
    options = dict(attention)
    name = str(options.pop("name", ""))
    layers: list[Attention] = []

    def mechanism(layer: int) -> Attention:
        made = create(
            name,
            options_of_layer(name, options, layer=layer, num_layers=model.num_layers),
            num_heads=model.num_heads,
            head_dim=model.model_dim // model.num_heads,
            model_dim=model.model_dim,
            max_length=model.max_length,
            seed=_layer_seed(seed, layer),
        )
        layers.append(made)
        if layer > 0 and isinstance(made, SharesParameters):
            made.share_with(layers[0])
        return made

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ProteinLM(model, vocab_size=len(VOCABULARY), pad=VOCABULARY.pad, mechanism=mechanism)


def _layer_seed(seed: int, layer: int) -> int:
    # Layers draw different projections; the stride separates neighboring seeds.
    return seed * 100_003 + layer
