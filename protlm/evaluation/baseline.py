"""The empirical baseline: residue frequencies of the training split (arXiv 2009.14794, C.2).

It knows nothing of a residue's context and always predicts the commonest one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import numpy as np

from protlm.data.vocabulary import VOCABULARY


def count_residues(sequences: Iterable[np.ndarray]) -> np.ndarray:
    """How often each token stands in the sequences, int64 [V].

    >>> int(count_residues([VOCABULARY.encode("MKV"), VOCABULARY.encode("VV")])[VOCABULARY["V"]])
    3
    """
    counts_V = np.zeros(len(VOCABULARY), dtype=np.int64)
    for tokens in sequences:
        counts_V += np.bincount(tokens, minlength=len(VOCABULARY))
    return counts_V


@final
@dataclass(frozen=True, eq=False)
class Unigram:
    """A distribution over the vocabulary, the same at every position.

    Attributes:
        frequency_V: float64; sums to 1 over the 25 residue letters, 0 elsewhere.
    """

    frequency_V: np.ndarray

    @classmethod
    def from_counts(cls, counts_V: np.ndarray) -> "Unigram":
        """The frequencies of residues in `counts_V`, each counted once more than it was seen.

        Special tokens are left out, whatever their count.
        """
        smoothed_V = np.where(VOCABULARY.is_residue, counts_V + 1.0, 0.0)
        return cls(smoothed_V / smoothed_V.sum())

    def score(self, targets: np.ndarray) -> tuple[float, int, int]:
        """Total nats, correct predictions, and the number of targets, which are residues."""
        assert VOCABULARY.is_residue[targets].all(), "only residues have a frequency"
        nats = -np.log(self.frequency_V[targets]).sum()
        correct = np.count_nonzero(targets == self.frequency_V.argmax())
        return float(nats), int(correct), int(targets.size)
