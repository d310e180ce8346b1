"""Features of proteins or residues without a model: the baselines of its embeddings."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from protlm.data.vocabulary import STANDARD, VOCABULARY

# Residues on either side in the window of the baseline.
_FLANK = 8
_FIRST, _LETTERS = int(VOCABULARY.residues[0]), len(VOCABULARY.residues)


def compositions(sequences: Sequence[str]) -> np.ndarray:
    """Returns the frequencies of the 20 amino acids and log(length), float32 [sequences, 21]."""
    features = np.zeros((len(sequences), len(STANDARD) + 1), dtype=np.float32)
    for row, sequence in enumerate(sequences):
        counts = np.bincount(_numbers(sequence), minlength=len(STANDARD))
        features[row, :-1] = counts[: len(STANDARD)] / max(len(sequence), 1)
        features[row, -1] = np.log(max(len(sequence), 1))
    return features


def three_mers(fit: Sequence[str], other: Sequence[str]) -> tuple[Any, Any]:
    """Returns TF-IDF of the 3-mers that occur in `fit`: two sparse matrices with rows of norm 1."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(
        analyzer="char", ngram_range=(3, 3), lowercase=False, sublinear_tf=True
    )
    return vectorizer.fit_transform(fit), vectorizer.transform(other)


def protein_baselines(sequences: Sequence[str], fit: Sequence[int]) -> dict[str, Any]:
    """Returns features of all proteins, [sequences, width], by name.

    `composition` has the frequencies of the amino acids and the length, `three_mers` TF-IDF of
    the 3-mers that occur in the rows `fit`, and `length` the logarithm of the length.
    """
    composition = compositions(sequences)
    _, known = three_mers([sequences[row] for row in fit], sequences)
    return {"composition": composition, "three_mers": known, "length": composition[:, -1:]}


def residue_baselines(
    sequences: Sequence[str], places: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns one-hot features of residues by name, float32 [residues, width].

    `residues_around` has the letters of the residue and of eight on either side, `residue` its own.
    """
    windows = []
    for sequence, where in zip(sequences, places, strict=True):
        letters = np.eye(_LETTERS, dtype=np.float32)[_numbers(sequence)]
        padded = np.pad(letters, ((_FLANK, _FLANK), (0, 0)))
        shifted = [padded[where + shift] for shift in range(2 * _FLANK + 1)]
        windows.append(np.concatenate(shifted, axis=1))
    around = np.concatenate(windows)
    return {
        "residues_around": around,
        "residue": around[:, _FLANK * _LETTERS : (_FLANK + 1) * _LETTERS],
    }


def _numbers(sequence: str) -> np.ndarray:
    """Returns the numbers of letters among the residues of the vocabulary, int64."""
    return VOCABULARY.encode(sequence).astype(np.int64) - _FIRST
