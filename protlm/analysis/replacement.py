"""A trained model with another mechanism in some of its layers, all weights unchanged."""

import copy
from collections.abc import Callable, Iterable, Mapping

from protlm.attention import Attention, create
from protlm.model.block import Block
from protlm.model.pretrained import PretrainedModel

Mechanism = Callable[[int], Attention]


def with_attention(
    model: PretrainedModel, mechanism: Mechanism, layers: Iterable[int]
) -> PretrainedModel:
    """Returns a model with another mechanism in the blocks `layers`, numbered from 1.

    The weights are those of `model`, in the same memory, so that they must not be changed.
    """
    tensors = [*model.network.parameters(), *model.network.buffers()]
    network = copy.deepcopy(model.network, {id(tensor): tensor for tensor in tensors})
    for number in layers:
        block = network.blocks[number - 1]
        assert isinstance(block, Block)
        block.attention.mechanism = mechanism(number).to(model.device)
    return PretrainedModel(
        network, model.description, rebuild=lambda seed: model.with_random_weights(seed).network
    )


def favor(
    model: PretrainedModel,
    num_features: int,
    *,
    draw: int,
    optimal_for: Mapping[int, float] | None = None,
) -> Mechanism:
    """Returns a function that builds `performer_softmax` for a block of a model.

    Args:
        model: the model, which determines the sizes.
        num_features: random features R.
        draw: the number of the draw of the projections.
        optimal_for: E|q̂ + k̂|² by block, for optimal positive features.
    """
    sizes = model.description.model

    def mechanism(layer: int) -> Attention:
        return create(
            "performer_softmax",
            {
                "num_features": num_features,
                "optimal_for": None if optimal_for is None else optimal_for[layer],
            },
            num_heads=sizes.num_heads,
            head_dim=sizes.model_dim // sizes.num_heads,
            model_dim=sizes.model_dim,
            max_length=sizes.max_length,
            seed=draw * model.num_layers + layer,
        )

    return mechanism
