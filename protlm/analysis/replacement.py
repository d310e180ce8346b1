"""A trained model with other mechanisms in its layers, all weights unchanged; and what that costs.

The costs are those of predicted residues and of predicted contacts of some proteins.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
import torch
import torch.nn.functional as F

from protlm.analysis.contact_regression import ContactRegression, check_disjoint, head_features
from protlm.analysis.precision import precision_at
from protlm.analysis.proteins import Protein
from protlm.attention import Attention, create
from protlm.data.masking import row_rng
from protlm.data.vocabulary import VOCABULARY
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

    `draw` is the number of the draw of the projections; `optimal_for` has E|q̂ + k̂|² by block, for
    optimal positive features.
    """
    sizes = model.description.model

    def mechanism(layer: int) -> Attention:
        optimal = None if optimal_for is None else optimal_for[layer]
        return create(
            "performer_softmax",
            {"num_features": num_features, "optimal_for": optimal},
            num_heads=sizes.num_heads,
            head_dim=sizes.model_dim // sizes.num_heads,
            model_dim=sizes.model_dim,
            max_length=sizes.max_length,
            seed=draw * model.num_layers + layer,
        )

    return mechanism


class ProteinScores(NamedTuple):
    """The nats, correct predictions and targets of each protein, float64."""

    nats: np.ndarray
    correct: np.ndarray
    targets: np.ndarray


@torch.inference_mode()
def masked_scores(
    model: PretrainedModel, sequences: Sequence[str], *, mask_fraction: float = 0.15, seed: int = 0
) -> ProteinScores:
    """Scores the predictions of residues, with the same masks for all models compared.

    A masked model predicts `mask_fraction` of the residues of each protein, at least one, replaced
    by `<mask>`; the places depend on the seed and on the number of the protein. A causal model
    predicts every residue from those before it.
    """
    rows = []
    for number, sequence in enumerate(sequences):
        batch = model.tokenize([sequence])
        residues = batch.tokens_BL[0, 1:-1]
        tokens_BL = batch.tokens_BL.clone()
        places = np.arange(len(residues))
        if not model.causal:
            chosen = row_rng(seed, 0, number).permutation(len(residues))
            places = np.sort(chosen[: max(1, round(mask_fraction * len(residues)))])
            tokens_BL[0, 1 + places] = VOCABULARY.mask
        logits_BLV = model.network(tokens_BL, batch.mask_BL, causal=model.causal).logits_BLV
        predicted = logits_BLV[0, places if model.causal else 1 + places].double()
        targets = residues[places]
        nats = F.cross_entropy(predicted, targets, reduction="sum")
        correct = (predicted.argmax(-1) == targets).sum()
        rows.append((float(nats), float(correct), float(len(places))))
    return ProteinScores(*np.array(rows).T)


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
