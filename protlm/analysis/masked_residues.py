"""What a change of a model costs: its predictions of residues of some proteins."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from protlm.data.masking import row_rng
from protlm.model.pretrained import PretrainedModel


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
        words = model.vocabulary
        residues = batch.tokens_BL[0, words.inner]
        tokens_BL = batch.tokens_BL.clone()
        places = np.arange(len(residues))
        if not model.causal:
            chosen = row_rng(seed, 0, number).permutation(len(residues))
            places = np.sort(chosen[: max(1, round(mask_fraction * len(residues)))])
            tokens_BL[0, words.start + places] = words.mask
        logits_BLV = model.network(tokens_BL, batch.mask_BL, causal=model.causal).logits_BLV
        asked = words.before if model.causal else words.inner
        predicted = logits_BLV[0, asked][places].cpu().double()
        targets = residues[places].cpu()
        nats = F.cross_entropy(predicted, targets, reduction="sum")
        correct = (predicted.argmax(-1) == targets).sum()
        rows.append((float(nats), float(correct), float(len(places))))
    return ProteinScores(*np.array(rows).T)
