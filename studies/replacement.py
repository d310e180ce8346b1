"""Replaces the attention of a trained softmax model and measures the effect.

All weights stay as they are, an estimate replaces softmax, and nothing is trained again
(arXiv 2009.14794, section 4.2 and Fig. 14).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from protlm.attention.linearized.variance import SquareNorms, pair_sums
from protlm.data.shards.data_set import open_split
from protlm.data.vocabulary import VOCABULARY
from protlm.evaluation.accuracy import Accuracy
from protlm.evaluation.base import EvaluationData
from protlm.loading import load_model
from protlm.model.pretrained import PretrainedModel, TokenBatch
from protlm.system.errors import UserError
from studies.estimates import UniformAttention
from studies.replaced_attention import Mechanism, favor, with_attention

SOFTMAX, UNIFORM, POSITIVE, OPTIMAL = "softmax", "uniform", "positive", "OPRF"
CUMULATIVE, SINGLE = "error, blocks 1 to n replaced", "error, block n replaced"
NORM, LARGEST_NORM = "E|q̂+k̂|², mean of the heads", "E|q̂+k̂|², largest head"
PERPLEXITY, ACCURACY = "perplexity", "accuracy"
TOKENS_PER_BATCH = 8192


@dataclass(frozen=True)
class Row:
    """One number of a layer, or of the whole model as layer 0."""

    model: str
    estimator: str
    num_features: int
    draw: int
    quantity: str
    layer: int
    value: float


def medians(
    rows: Sequence[Row], model: str, estimator: str, quantity: str
) -> dict[tuple[int, int], float]:
    """Returns the medians over the draws, by number of features and layer."""
    values: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        if (row.model, row.estimator, row.quantity) == (model, estimator, quantity):
            values.setdefault((row.num_features, row.layer), []).append(row.value)
    return {place: float(np.median(found)) for place, found in values.items()}


def load_softmax(path: Path) -> PretrainedModel:
    """Loads a model whose attention can be replaced.

    Raises:
        UserError: it was trained with another mechanism than softmax, or on another objective.
    """
    model = load_model(path)
    name = model.description.attention
    if name != "softmax" or model.causal:
        raise UserError(
            f"{path} was trained with attention={name} objective="
            f"{model.description.objective}; give a run of attention=softmax objective=masked"
        )
    return model


@torch.inference_mode()
def square_norms(model: PretrainedModel, batch: TokenBatch) -> dict[int, SquareNorms]:
    """Returns E|q̂ ± k̂|² of every head over the pairs of positions of a protein, by block."""
    inputs = model.network.attention_inputs(batch.tokens_BL, batch.mask_BL, causal=model.causal)
    return {
        layer: SquareNorms.of(pair_sums(x.q_BHLK, x.k_BHLK, batch.mask_BL, causal=model.causal))
        for layer, x in inputs
    }


def state_errors(
    exact: PretrainedModel, other: PretrainedModel, batch: TokenBatch
) -> dict[int, float]:
    """Returns relative errors of the hidden states of `other`, in the Frobenius norm, by block.

    The last state is the one after the final norm, if the model has one.
    """
    layers = range(1, exact.num_layers + 1)
    right, wrong = exact(batch, layers).hidden, other(batch, layers).hidden
    errors = {}
    for layer in layers:
        # Hidden states at padding have no meaning and do not count.
        states, estimates = right[layer][batch.mask_BL], wrong[layer][batch.mask_BL]
        errors[layer] = ((estimates - states).norm() / states.norm()).item()
    return errors


class Subject:
    """A model, the proteins for its hidden states, and the split for its scores.

    Args:
        path: a run, a checkpoint or an exported folder of attention=softmax.
        data: the data set.
        split: the split that is scored, whose first proteins give the hidden states.
        proteins: how many of them.
    """

    def __init__(self, path: Path, data: Path, *, split: str, proteins: int) -> None:
        self.name = path.name
        self.model = load_softmax(path)
        self._layers = range(1, self.model.num_layers + 1)
        reader, train = open_split(data, split), open_split(data, "train")
        self._data = EvaluationData(reader, train, TOKENS_PER_BATCH)
        longest = self.model.description.max_length - 2
        chosen = range(min(proteins, len(reader)))
        self.batch = self.model.tokenize([VOCABULARY.decode(reader[n][:longest]) for n in chosen])
        self._norms = square_norms(self.model, self.batch)

    def references(self) -> Iterator[Row]:
        """Yields the rows of softmax itself, and of uniform attention in its place."""
        for layer, norms in self._norms.items():
            yield Row(self.name, SOFTMAX, 0, 0, NORM, layer, norms.sum_H.mean().item())
            yield Row(self.name, SOFTMAX, 0, 0, LARGEST_NORM, layer, norms.sum_H.max().item())
        for quantity, value in self._scores(self.model):
            yield Row(self.name, SOFTMAX, 0, 0, quantity, 0, value)
        yield from self._replaced(UNIFORM, 0, 0, lambda layer: UniformAttention())

    def estimates(self, num_features: int, draw: int) -> Iterator[Row]:
        """Yields the rows of FAVOR+ in place of softmax, as shipped and optimal for each block.

        Scores are the most expensive and are measured for the first draw only.
        """
        optimal_for = {layer: norms.sum_H.mean().item() for layer, norms in self._norms.items()}
        for name, norms in ((POSITIVE, None), (OPTIMAL, optimal_for)):
            mechanism = favor(self.model, num_features, draw=draw, optimal_for=norms)
            yield from self._replaced(name, num_features, draw, mechanism)

    def _replaced(
        self, name: str, num_features: int, draw: int, mechanism: Mechanism
    ) -> Iterator[Row]:
        place = (self.name, name, num_features, draw)
        everywhere = with_attention(self.model, mechanism, self._layers)
        for layer, error in state_errors(self.model, everywhere, self.batch).items():
            yield Row(*place, CUMULATIVE, layer, error)
        for layer in self._layers:
            once = with_attention(self.model, mechanism, [layer])
            error = state_errors(self.model, once, self.batch)[layer]
            yield Row(*place, SINGLE, layer, error)
        if draw == 0:
            for quantity, value in self._scores(everywhere):
                yield Row(*place, quantity, 0, value)

    def _scores(self, model: PretrainedModel) -> Iterator[tuple[str, float]]:
        scores = Accuracy(objective="masked").run(model, self._data)["model"]
        return ((quantity, scores[quantity]) for quantity in (ACCURACY, PERPLEXITY))
