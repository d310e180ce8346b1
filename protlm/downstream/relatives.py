"""Relatives of a protein among others, by the 5-mers that they share.

If each residue is conserved independently with probability p, the fraction of conserved 5-mers is
p^5: a tenth of them at about 63 % identity. Remote homologs share fewer and are not found. The
fraction is that of the shorter protein, so that a fragment is found in a long one and the reverse.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

K = 5
MIN_SHARED = 0.1
# A peptide of fewer 5-mers counts as this number: one of them may be shared by chance.
_LEAST = 20
_ROWS = 256


def highest_shares(queries: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """Returns for each query the highest fraction of distinct 5-mers shared with one of the others.

    Args:
        queries: sequences; those of fewer than 5 residues have a share of 0.
        others: the sequences that are searched.

    Returns:
        Shared 5-mers divided by those of the shorter sequence, or by 20 if it has fewer, float64
        [queries].

    >>> highest_shares(["MKTAYIAK", "WWWWWW"], ["AAAA", "MKTAYI"]).tolist()
    [0.1, 0.0]
    """
    from sklearn.feature_extraction.text import CountVectorizer

    best = np.zeros(len(queries))
    vectorizer: Any = CountVectorizer(
        analyzer="char", ngram_range=(K, K), lowercase=False, binary=True
    )
    if not queries or max(map(len, others), default=0) < K:
        return best
    by_other = vectorizer.fit_transform(others)
    known, known_sizes = by_other.T.tocsr(), by_other.getnnz(axis=1)
    sizes = np.array([len({one[n : n + K] for n in range(len(one) - K + 1)}) for one in queries])
    for start in range(0, len(queries), _ROWS):
        rows = slice(start, start + _ROWS)
        shared = (vectorizer.transform(queries[rows]) @ known).tocoo()
        shorter = np.minimum(sizes[rows][shared.row], known_sizes[shared.col])
        np.maximum.at(best[rows], shared.row, shared.data / np.maximum(shorter, _LEAST))
    return best
