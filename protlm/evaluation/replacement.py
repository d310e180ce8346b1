"""A trained model with another mechanism in some of its layers, all weights unchanged."""

import copy
from collections.abc import Callable, Iterable

from protlm.attention import Attention
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
