"""Predictions of masked residues, and what a change of a model costs them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from protlm.data.masking import row_rng
from protlm.model.pretrained import PretrainedModel


class ProteinScores(NamedTuple):
    """The nats, correct predictions and targets of each protein, float64."""

    nats: np.ndarray
    correct: np.ndarray
    targets: np.ndarray


@torch.inference_mode()
def log_probabilities(
    model: PretrainedModel, residues: str, *, hidden: np.ndarray, places: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probabilities of all tokens at places of a protein, and the true tokens.

    They are float64 [places, tokens] and int64. A masked model sees `<mask>` in the hidden places;
    a causal one predicts each from the residues before it, and hides none.
    """
    batch, words = model.batch_of([residues]), model.vocabulary
    tokens_BL = batch.tokens_BL.clone()
    targets = tokens_BL[0, words.inner][places].cpu().numpy()
    if not model.causal:
        tokens_BL[0, words.start + hidden] = words.mask
    logits_BLV = model.network(tokens_BL, batch.mask_BL, causal=model.causal).logits_BLV
    asked = words.before if model.causal else words.inner
    # In float64 on the CPU: not every device has it.
    return logits_BLV[0, asked][places].cpu().double().log_softmax(-1).numpy(), targets


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
        places = np.arange(len(sequence))
        if not model.causal:
            chosen = row_rng(seed, 0, number).permutation(len(sequence))
            places = np.sort(chosen[: max(1, round(mask_fraction * len(sequence)))])
        log_p, targets = log_probabilities(model, sequence, hidden=places, places=places)
        nats = -log_p[np.arange(len(targets)), targets].sum()
        rows.append((nats, (log_p.argmax(1) == targets).sum(), len(targets)))
    return ProteinScores(*np.array(rows, np.float64).T)
