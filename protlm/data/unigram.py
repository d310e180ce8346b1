"""The empirical baseline: residue frequencies of the training split (arXiv 2009.14794, C.2).

It ignores the context of a residue. If targets may be visible in the input, as with BERT's
80/10/10, `Unigram.posterior` gives the prediction from the frequencies and the input token.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import numpy as np

from protlm.data.masking import MaskingRule
from protlm.data.vocabulary import VOCABULARY


def count_residues(sequences: Iterable[np.ndarray]) -> np.ndarray:
    """Counts each token in the sequences, int64 [V].

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
        frequency_V: float64; sums to 1 over the 25 residue letters; 0 elsewhere.
    """

    frequency_V: np.ndarray

    @classmethod
    def from_counts(cls, counts_V: np.ndarray) -> "Unigram":
        """Computes residue frequencies from `counts_V`, with add-one smoothing.

        Special tokens are left out.
        """
        smoothed_V = np.where(VOCABULARY.is_residue, counts_V + 1.0, 0.0)
        return cls(smoothed_V / smoothed_V.sum())

    def posterior(self, rule: MaskingRule | None) -> np.ndarray:
        """Computes the probability of each target, given the input token at its position.

        The input `<mask>` is independent of the target t. An input residue x was either unchanged,
        with the probability keep = 1 - mask_prob - random_prob, or drawn from the R residues:
        P(t | x) = (keep f_x [t = x] + random f_t / R) / (keep f_x + random / R).

        Args:
            rule: the masking rule; None for causal targets, which do not depend on the input at
                their position.

        Returns:
            float64 [V, V], by input and target; rows sum to 1.
        """
        table_VV = np.tile(self.frequency_V, (len(VOCABULARY), 1))
        if rule is None:
            return table_VV
        keep = max(1 - rule.mask_prob - rule.random_prob, 0.0)
        drawn = rule.random_prob / len(VOCABULARY.residues)
        if keep == drawn == 0:
            return table_VV
        for x in VOCABULARY.residues.tolist():
            joint_V = drawn * self.frequency_V
            joint_V[x] += keep * self.frequency_V[x]
            table_VV[x] = joint_V / joint_V.sum()
        return table_VV

    def score(self, targets: np.ndarray) -> tuple[float, int, int]:
        """Returns total nats, number of correct predictions, and number of targets (residues)."""
        assert VOCABULARY.is_residue[targets].all(), "only residues have a frequency"
        nats = -np.log(self.frequency_V[targets]).sum()
        correct = np.count_nonzero(targets == self.frequency_V.argmax())
        return float(nats), int(correct), int(targets.size)
