"""A trained softmax model with the attention of some blocks replaced, and what becomes of it.

Backward compatibility as in arXiv 2009.14794, section 4.2 and Fig. 14: every weight stays, softmax
is exchanged for an estimate of it, and nothing is trained anew.
"""

import copy
from collections.abc import Callable, Iterable, Mapping

import torch

from protlm.attention import Attention, create
from protlm.attention.performer.variance import SquareNorms, pair_sums
from protlm.model.block import Block
from protlm.model.pretrained import PretrainedModel, TokenBatch

Mechanism = Callable[[int], Attention]


def with_attention(
    model: PretrainedModel, mechanism: Mechanism, layers: Iterable[int]
) -> PretrainedModel:
    """The same weights with another mechanism in the blocks `layers`, numbered from 1."""
    network = copy.deepcopy(model.network)
    for number in layers:
        block = network.blocks[number - 1]
        assert isinstance(block, Block)
        block.attention.mechanism = mechanism(number).to(model.device)
    return PretrainedModel(
        network, model.description, rebuild=lambda seed: model.randomised(seed).network
    )


def favor(
    model: PretrainedModel,
    num_features: int,
    *,
    draw: int,
    optimal_for: Mapping[int, float] | None = None,
) -> Mechanism:
    """What builds `performer_softmax` for a block of a model.

    Args:
        model: the model whose sizes it has to fit.
        num_features: random features R.
        draw: another number draws other projections.
        optimal_for: E|q̂ + k̂|² by block for optimal positive features, where they are wanted.
    """
    sizes = model.description["model"]

    def mechanism(layer: int) -> Attention:
        return create(
            "performer_softmax",
            {
                "num_features": num_features,
                "optimal_for": None if optimal_for is None else optimal_for[layer],
            },
            num_heads=sizes["num_heads"],
            head_dim=sizes["model_dim"] // sizes["num_heads"],
            model_dim=sizes["model_dim"],
            max_length=sizes["max_length"],
            seed=draw * model.num_layers + layer,
        )

    return mechanism


@torch.inference_mode()
def square_norms(model: PretrainedModel, batch: TokenBatch) -> dict[int, SquareNorms]:
    """E|q̂ ± k̂|² of every head over the pairs of positions of a protein, by block."""
    inputs = model.network.attention_inputs(batch.tokens_BL, batch.mask_BL, causal=model.causal)
    return {
        layer: SquareNorms.of(pair_sums(x.q_BHLK, x.k_BHLK, batch.mask_BL, causal=model.causal))
        for layer, x in inputs
    }


def state_errors(
    exact: PretrainedModel, other: PretrainedModel, batch: TokenBatch
) -> dict[int, float]:
    """Relative errors of the hidden states of `other`, in the Frobenius norm, after each block.

    The last is taken after the final norm, where the model has one.
    """
    layers = range(1, exact.num_layers + 1)
    right, wrong = exact(batch, layers).hidden, other(batch, layers).hidden
    errors = {}
    for layer in layers:
        # At padding the hidden states mean nothing, so they do not count.
        states, estimates = right[layer][batch.mask_BL], wrong[layer][batch.mask_BL]
        errors[layer] = ((estimates - states).norm() / states.norm()).item()
    return errors
