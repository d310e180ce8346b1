"""Relatives of a protein among others, by the 5-mers that they share.

If each residue is conserved independently with probability p, the fraction of conserved 5-mers is
p^5: a tenth of them at about 63 % identity. Remote homologs share fewer and are not found.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

K = 5
MIN_SHARED = 0.1
_ROWS = 256


def highest_shares(queries: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """Returns for each query the highest fraction of its distinct 5-mers in one of the others.

    Args:
        queries: sequences; those of fewer than 5 residues have a share of 0.
        others: the sequences that are searched.

    Returns:
        Fractions from 0 to 1, float64 [queries].

    >>> highest_shares(["MKTAYIAK", "WWWWWW"], ["AAAA", "MKTAYI"]).tolist()
    [0.5, 0.0]
    """
    from sklearn.feature_extraction.text import CountVectorizer

    best = np.zeros(len(queries))
    vectorizer: Any = CountVectorizer(
        analyzer="char", ngram_range=(K, K), lowercase=False, binary=True
    )
    if not queries or max(map(len, others), default=0) < K:
        return best
    known = vectorizer.fit_transform(others).T.tocsr()
    sizes = [len({one[n : n + K] for n in range(len(one) - K + 1)}) for one in queries]
    for start in range(0, len(queries), _ROWS):
        rows = slice(start, start + _ROWS)
        shared = vectorizer.transform(queries[rows]) @ known
        best[rows] = shared.max(axis=1).toarray()[:, 0]
    return best / np.maximum(sizes, 1)
