"""A trained model with other mechanisms in its layers and the same weights, and what that costs."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from protlm.analysis.contact_regression import ContactRegression, check_disjoint, head_features
from protlm.analysis.precision import precision_at
from protlm.analysis.structures import Protein
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
        if network.relative is not None:
            network.relative.add_to(block.attention.mechanism)
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

    `optimal_for` has E|q̂ + k̂|² by block, for optimal positive features.
    """
    sizes = model.description.model

    def mechanism(layer: int) -> Attention:
        optimal = None if optimal_for is None else optimal_for[layer]
        return create(
            "performer_softmax",
            {"num_features": num_features, "optimal_for": optimal},
            num_heads=sizes.num_heads,
            head_dim=sizes.width_of_head,
            model_dim=sizes.model_dim,
            max_length=sizes.max_length,
            seed=draw * model.num_layers + layer,
        )

    return mechanism


@final
class FittedContacts:
    """P@L of proteins over pairs 6 or more apart, by a regression that is fitted to others."""

    def __init__(
        self,
        model: PretrainedModel,
        fit: Sequence[Protein],
        proteins: Sequence[Protein],
        *,
        seed: int,
    ) -> None:
        check_disjoint(fit, proteins)
        self._proteins = proteins
        self._regression = ContactRegression(seed=seed).fit(
            (head_features(model, protein.sequence), protein.contacts()) for protein in fit
        )

    def of(self, model: PretrainedModel, ablated: int | None = None) -> np.ndarray:
        """Returns P@L of each protein by a model, without one of its heads; NaN without a pair."""
        found = []
        for protein in self._proteins:
            features_HLL = head_features(model, protein.sequence)
            if ablated is not None:
                features_HLL[ablated] = 0.0
            predicted_LL = self._regression.predict(features_HLL)
            found.append(precision_at(predicted_LL, protein.contacts()))
        return np.array(found)


TOP_KEYS = 10
# Estimated weights below this count as this in a divergence, which is infinite otherwise.
_SMALLEST = 1e-30


def compare_estimates(
    exact_HLM: Tensor, estimates: Sequence[Tensor], v_HMC: Tensor
) -> dict[str, Tensor]:
    """Compares several draws of an estimated map with the exact map, per head, float64 H.

    With a row a of the exact map, â of an estimate, values V, and O = A V:

    * `kl`: KL(a ‖ â) in nats, `total_variation`: Σ |a - â| / 2, each the median over rows and
      draws; `total_variation_95`: its 95th percentile;
    * `top_overlap`: the fraction of the 10 largest weights of a row that are among the 10 largest
      of its estimate, mean over rows and draws;
    * `output_error`: ‖Ô - O‖ / ‖O‖, root mean square over draws;
    * `bias`, `deviation`: the error of the mean output and the deviation of the draws from it,
      output_error² = bias² + deviation². Their squares are unbiased for any number of draws, at
      least two; a negative bias² becomes 0.
    """
    number, a_HLM = len(estimates), exact_HLM.double()
    assert number >= 2, "one draw has no variance"
    outputs = torch.stack([x.double() @ v_HMC.double() for x in estimates])
    exact_HLC = a_HLM @ v_HMC.double()
    square_H = exact_HLC.square().sum(dim=(1, 2))
    mean_HLC = outputs.mean(dim=0)
    variance_H = (outputs - mean_HLC).square().sum(dim=(0, 2, 3)) / (number - 1) / square_H
    bias_H = (mean_HLC - exact_HLC).square().sum(dim=(1, 2)) / square_H - variance_H / number
    error_H = (outputs - exact_HLC).square().sum(dim=(0, 2, 3)) / number / square_H
    divergences = [_divergences(a_HLM, x.double()) for x in estimates]
    kl_HL, variation_HL, overlap_HL = (
        torch.cat(parts, dim=1) for parts in zip(*divergences, strict=True)
    )
    return {
        "kl": kl_HL.quantile(0.5, dim=1),
        "total_variation": variation_HL.quantile(0.5, dim=1),
        "total_variation_95": variation_HL.quantile(0.95, dim=1),
        "top_overlap": overlap_HL.mean(dim=1),
        "output_error": error_H.sqrt(),
        "bias": bias_H.clamp(min=0).sqrt(),
        "deviation": variance_H.sqrt(),
    }


def _divergences(a_HLM: Tensor, estimate_HLM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    positive_HLM = estimate_HLM.clamp(min=_SMALLEST)
    kl_HL = (torch.special.xlogy(a_HLM, a_HLM) - a_HLM * positive_HLM.log()).sum(dim=2)
    variation_HL = 0.5 * (a_HLM - estimate_HLM).abs().sum(dim=2)
    top = min(TOP_KEYS, a_HLM.shape[2])
    chosen = [
        torch.zeros_like(x, dtype=torch.bool).scatter(2, x.topk(top, dim=2).indices, True)
        for x in (a_HLM, estimate_HLM)
    ]
    overlap_HL = (chosen[0] & chosen[1]).sum(dim=2) / top
    return kl_HL, variation_HL, overlap_HL.double()
