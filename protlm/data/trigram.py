"""The 3-mer baseline: each residue predicted from two neighbors, by counting the training split.

For masked targets the neighbors are the residues on both sides, for causal targets the two residues
before. Where a neighbor is masked itself, the counts are summed over it.
"""

from collections.abc import Iterable
from typing import final

import numpy as np

from protlm.data.unigram import Unigram, count_residues
from protlm.data.vocabulary import VOCABULARY

_V = len(VOCABULARY)
# Tokens that are counted at once.
_TOKENS = 1 << 20


@final
class Trigram:
    """A distribution over the residues for every pair of neighboring tokens.

    P(t | x, y) = (n(x, y, t) + κ f(t)) / (n(x, y) + κ), with the counts n of the training split,
    its residue frequencies f and κ = 20.

    Args:
        sequences: residue tokens, uint8.
        causal: whether the neighbors are the two tokens before a residue, or one on either side.
    """

    PSEUDOCOUNT = 20.0

    def __init__(self, sequences: Iterable[np.ndarray], *, causal: bool) -> None:
        self.causal = causal
        flat_counts = np.zeros(_V**3, dtype=np.int64)
        counts_V = np.zeros(_V, dtype=np.int64)
        for tokens in _joined(sequences):
            targets = tokens[1:-1] if not causal else tokens[2:]
            first = tokens[:-2]
            second = tokens[2:] if not causal else tokens[1:-1]
            place = (first.astype(np.int64) * _V + second) * _V + targets
            kept = VOCABULARY.is_residue[targets]
            flat_counts += np.bincount(place[kept], minlength=_V**3)
            counts_V += count_residues([tokens])
        counts = flat_counts.reshape(_V, _V, _V).astype(np.float64)
        counts[VOCABULARY.mask] = counts.sum(axis=0)
        counts[:, VOCABULARY.mask] = counts.sum(axis=1)
        prior_V = self.PSEUDOCOUNT * Unigram.from_counts(counts_V).frequency_V
        counts += prior_V
        self._probability_VVV = counts / counts.sum(axis=-1, keepdims=True)

    def probabilities(self, tokens_BL: np.ndarray) -> np.ndarray:
        """Returns the probability of each residue at each position, float64 BLV.

        Args:
            tokens_BL: the input of a model, special tokens included; a row may hold several
                sequences, each ended by `<eos>`. A masked target is predicted from the tokens
                beside it; a causal position predicts the next token.
        """
        edge_B1 = np.full_like(tokens_BL[:, :1], VOCABULARY.cls)
        # In a row of joined sequences one begins after <eos>, but they were counted after <cls>.
        is_end_BL = tokens_BL == VOCABULARY.eos
        left_BL = np.where(is_end_BL, VOCABULARY.cls, tokens_BL)
        before_BL = np.concatenate([edge_B1, left_BL[:, :-1]], axis=1)
        if self.causal:
            before_BL[is_end_BL] = VOCABULARY.cls
            return self._probability_VVV[before_BL, left_BL]
        after_BL = np.concatenate([tokens_BL[:, 1:], edge_B1], axis=1)
        return self._probability_VVV[before_BL, after_BL]


def _joined(sequences: Iterable[np.ndarray]) -> Iterable[np.ndarray]:
    """Yields stretches of sequences, each sequence between two `<cls>` and an `<eos>`."""
    start = np.full(2, VOCABULARY.cls, dtype=np.uint8)
    end = np.full(1, VOCABULARY.eos, dtype=np.uint8)
    parts: list[np.ndarray] = []
    size = 0
    for tokens in sequences:
        parts += [start, tokens, end]
        size += len(tokens)
        if size >= _TOKENS:
            yield np.concatenate(parts)
            parts, size = [], 0
    if parts:
        yield np.concatenate(parts)
