"""Features of whole sequences: mean embeddings, and the baselines composition and 3-mers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from protlm.data.dataset import collate
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.model.pretrained import PretrainedModel
from protlm.system.terminal import JobProgress

_FIRST, _NUM_STANDARD = int(VOCABULARY.residues[0]), len(STANDARD)


@torch.inference_mode()
def mean_embeddings(
    model: PretrainedModel,
    sequences: Sequence[np.ndarray],
    *,
    layers: Sequence[int],
    tokens_per_batch: int,
) -> list[np.ndarray]:
    """Returns means over the residues of each sequence, float32 [sequences, D], by layer.

    Args:
        model: the model.
        sequences: residue tokens, uint8; cropped to the length that the model accepts.
        layers: 0 the embedding, n the output of block n.
        tokens_per_batch: the largest number of rows times padded length.
    """
    width = model.network.embedding.embedding_dim
    means = [np.empty((len(sequences), width), dtype=np.float32) for _ in layers]
    longest = model.max_residues
    cropped = [tokens[:longest] for tokens in sequences]
    order = np.argsort([-len(tokens) for tokens in cropped], kind="stable")
    start = 0
    with JobProgress("sequences embedded", len(order)) as progress:
        while start < len(order):
            num_rows = max(tokens_per_batch // (len(cropped[order[start]]) + 2), 1)
            rows = order[start : start + num_rows]
            tokens_BL, mask_BL = collate([cropped[row] for row in rows])
            tokens_BL, mask_BL = tokens_BL.to(model.device), mask_BL.to(model.device)
            out = model.network(tokens_BL, mask_BL, causal=model.causal, layers=layers)
            is_residue_BL = mask_BL & (tokens_BL != VOCABULARY.cls) & (tokens_BL != VOCABULARY.eos)
            for mean, layer in zip(means, layers, strict=True):
                sums_BD = (out.hidden[layer].float() * is_residue_BL[..., None]).sum(dim=1)
                counts_B1 = is_residue_BL.sum(dim=1, keepdim=True).clamp(min=1)
                mean[rows] = (sums_BD / counts_B1).cpu().numpy()
            start += num_rows
            progress.update(min(start, len(order)))
    return means


def compositions(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the frequencies of the 20 amino acids and log(length), float32 [sequences, 21]."""
    features = np.zeros((len(sequences), _NUM_STANDARD + 1), dtype=np.float32)
    for row, tokens in enumerate(sequences):
        counts = np.bincount(tokens.astype(np.int64) - _FIRST, minlength=_NUM_STANDARD)
        features[row, :-1] = counts[:_NUM_STANDARD] / max(len(tokens), 1)
        features[row, -1] = np.log(max(len(tokens), 1))
    return features


def three_mers(fit: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> tuple[Any, Any]:
    """Returns TF-IDF of the 3-mers that occur in `fit`: two sparse matrices with rows of norm 1."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(
        analyzer="char", ngram_range=(3, 3), lowercase=False, sublinear_tf=True
    )
    known = vectorizer.fit_transform(map(VOCABULARY.decode, fit))
    return known, vectorizer.transform(map(VOCABULARY.decode, other))
