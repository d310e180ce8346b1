"""Baselines by counting the training split: residue frequencies, and residues by two neighbors.

Residue frequencies (arXiv 2009.14794, C.2) ignore the context of a residue. If targets may be
visible in the input, as with BERT's 80/10/10, `posterior` gives the prediction from the
frequencies and the input token. The neighbors of a 3-mer are for masked targets the residues on
both sides, for causal targets the two residues before. Where a neighbor is masked itself, the
counts are summed over it.
"""

from collections.abc import Iterable, Iterator
from typing import final

import numpy as np

from protlm.data.batching.order import EpochOrder
from protlm.data.masking import MaskingRule
from protlm.data.relatives import batches
from protlm.data.shards.data_set import SplitReader
from protlm.data.vocabulary import VOCABULARY

_V = len(VOCABULARY)
# This many sequences give residue frequencies to four digits; all of TrEMBL would take an hour.
_MOST_COUNTED = 1 << 20


def count_residues(sequences: Iterable[np.ndarray]) -> np.ndarray:
    """Counts each token in the sequences, int64 [V].

    >>> int(count_residues([VOCABULARY.encode("MKV"), VOCABULARY.encode("VV")])[VOCABULARY["V"]])
    3
    """
    counts = (np.bincount(tokens, minlength=len(VOCABULARY)) for tokens in sequences)
    return sum(counts, np.zeros(len(VOCABULARY), dtype=np.int64))


def sample(sequences: SplitReader, max_residues: int | None = None) -> Iterator[np.ndarray]:
    """Returns the sequences of a split, or a random million of them, to count their residues."""
    order = EpochOrder(len(sequences), seed=0, epoch=0)
    numbers = order[np.arange(min(len(sequences), _MOST_COUNTED))].tolist()
    return (sequences[number][:max_residues] for number in numbers)


def frequencies(counts_V: np.ndarray) -> np.ndarray:
    """Returns residue frequencies with add-one smoothing, float64 V; special tokens have 0."""
    smoothed_V = np.where(VOCABULARY.is_residue, counts_V + 1.0, 0.0)
    return smoothed_V / smoothed_V.sum()


def posterior(frequency_V: np.ndarray, rule: MaskingRule | None) -> np.ndarray:
    """Returns the probability of each target given its input token, float64 [inputs, targets].

    The input `<mask>` is independent of the target t. An input residue x was either unchanged,
    with the probability keep = 1 - mask_prob - random_prob, or drawn from the R residues:
    P(t | x) = (keep f_x [t = x] + random f_t / R) / (keep f_x + random / R).

    Causal targets, without a rule, do not depend on the input at their position.
    """
    table_VV = np.tile(frequency_V, (len(VOCABULARY), 1))
    if rule is None:
        return table_VV
    keep = max(1 - rule.mask_prob - rule.random_prob, 0.0)
    drawn = rule.random_prob / len(VOCABULARY.residues)
    if keep == drawn == 0:
        return table_VV
    for x in VOCABULARY.residues.tolist():
        joint_V = drawn * frequency_V
        joint_V[x] += keep * frequency_V[x]
        table_VV[x] = joint_V / joint_V.sum()
    return table_VV


@final
class Trigram:
    """A distribution over the residues for every pair of neighboring tokens.

    P(t | x, y) = (n(x, y, t) + κ f(t)) / (n(x, y) + κ), with the counts n of the training split,
    its residue frequencies f and κ = 20. The neighbors are one token on either side of a residue,
    or, if causal, the two before it.
    """

    PSEUDOCOUNT = 20.0

    def __init__(self, sequences: Iterable[np.ndarray], *, causal: bool) -> None:
        self.causal = causal
        flat_counts = np.zeros(_V**3, dtype=np.int64)
        counts_V = np.zeros(_V, dtype=np.int64)
        for tokens in _joined(sequences):
            first, middle, last = tokens[:-2], tokens[1:-1], tokens[2:]
            second, targets = (middle, last) if causal else (last, middle)
            place = (first.astype(np.int64) * _V + second) * _V + targets
            kept = VOCABULARY.is_residue[targets]
            flat_counts += np.bincount(place[kept], minlength=_V**3)
            counts_V += count_residues([tokens])
        counts = flat_counts.reshape(_V, _V, _V).astype(np.float64)
        counts[VOCABULARY.mask] = counts.sum(axis=0)
        counts[:, VOCABULARY.mask] = counts.sum(axis=1)
        counts += self.PSEUDOCOUNT * frequencies(counts_V)
        self._probability_VVV = counts / counts.sum(axis=-1, keepdims=True)

    def probabilities(self, tokens_BL: np.ndarray) -> np.ndarray:
        """Returns the probability of each residue at each position, float64 BLV.

        A row may hold several sequences, each ended by `<eos>`. A causal position predicts the next
        token.
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
    """Yields joined sequences, each sequence between two `<cls>` and an `<eos>`."""
    start = np.full(2, VOCABULARY.cls, dtype=np.uint8)
    end = np.full(1, VOCABULARY.eos, dtype=np.uint8)
    for batch in batches(sequences):
        yield np.concatenate([part for tokens in batch for part in (start, tokens, end)])
