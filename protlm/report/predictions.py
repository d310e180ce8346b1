"""The distribution that a model predicts at each position of a protein."""

from typing import Any

import numpy as np

from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.downstream.predictions import Predictor, Query
from protlm.model.pretrained import PretrainedModel
from protlm.system.terminal import watched

_LETTERS = [VOCABULARY[letter] for letter in STANDARD]
_DECIMALS = 4


def predicted_distributions(model: PretrainedModel, sequence: str) -> np.ndarray:
    """Returns the probability of each of the 20 amino acids at each position, float64 [L, 20].

    A masked model predicts the residue at one masked position at a time, as `masked-marginals` in
    `protlm score`; this takes L passes. A causal model predicts it from the residues before it,
    in one pass. Rows sum to 1.
    """
    if model.causal:
        logits_LV = model(model.tokenize([sequence])).logits_BLV[0, :-2].double().cpu()
        log_p_L20 = logits_LV[:, _LETTERS].numpy()
    else:
        queries = [Query(sequence, position) for position in range(len(sequence))]
        found = Predictor(model).log_p(watched("predictions", queries))
        log_p_L20 = np.stack([log_p_V[_LETTERS] for _, log_p_V in found])
    p_L20 = np.exp(log_p_L20 - log_p_L20.max(axis=1, keepdims=True))
    return p_L20 / p_L20.sum(axis=1, keepdims=True)


def predictions_to_plain(model: PretrainedModel, sequence: str) -> dict[str, Any]:
    """Returns values for JSON: the distributions, and their entropies in nats."""
    p_L20 = predicted_distributions(model, sequence)
    entropy_L = -(p_L20 * np.log(np.maximum(p_L20, 1e-300))).sum(axis=1)
    return {
        "letters": STANDARD,
        "kind": "causal" if model.causal else "masked",
        "probabilities": p_L20.round(_DECIMALS).tolist(),
        "entropy": entropy_L.round(_DECIMALS).tolist(),
    }
