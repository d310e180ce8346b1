"""Relatives of a protein among others, by the 5-mers that they share.

If each residue is conserved independently with probability p, the fraction of conserved 5-mers is
p^5: a tenth of them at about 63 % identity over the whole length of the shorter protein, whose
fraction it is, so that a fragment is found in a long protein and the reverse. Remote homologs share
fewer and are not found, nor are long proteins that have one domain of several in common.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

K = 5
MIN_SHARED = 0.1
# A peptide of fewer 5-mers counts as this number: one of them may be shared by chance.
_LEAST = 20
_ROWS = 256


def highest_shared_fractions(queries: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """Returns for each query the highest fraction of distinct 5-mers shared with one of the others.

    Args:
        queries: sequences; the fraction is 0 for those of fewer than 5 residues.
        others: the sequences that are searched.

    Returns:
        Shared 5-mers divided by those of the shorter sequence, or by 20 if it has fewer, float64
        [queries].

    >>> highest_shared_fractions(["MKTAYIAK", "WWWWWW"], ["AAAA", "MKTAYI"]).tolist()
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
    sizes = np.array([len(_kmers(one)) for one in queries])
    for start in range(0, len(queries), _ROWS):
        rows = slice(start, start + _ROWS)
        shared = (vectorizer.transform(queries[rows]) @ known).tocoo()
        shorter = np.minimum(sizes[rows][shared.row], known_sizes[shared.col])
        np.maximum.at(best[rows], shared.row, shared.data / np.maximum(shorter, _LEAST))
    return best


def unrelated(sequences: Iterable[str], *, limit: int) -> list[int]:
    """Returns the places of the first sequences that are not relatives of one already taken.

    Relatives are equal, or share the fraction `MIN_SHARED` or more of the 5-mers, as in
    `highest_shared_fractions`.

    Args:
        sequences: read up to the last one that is taken.
        limit: the largest number of places.

    >>> unrelated(["MKTAYIAKQRQ", "MKTAYIAKQRQ", "WWWWWW", "MKTAYIAKHHH"], limit=3)
    [0, 2]
    """
    taken: dict[str, int] = {}
    sizes: list[int] = []
    having: defaultdict[str, list[int]] = defaultdict(list)
    for place, one in enumerate(sequences):
        kmers = _kmers(one)
        shared = Counter(chain.from_iterable(having[kmer] for kmer in kmers if kmer in having))
        if one not in taken and not any(
            number / max(min(len(kmers), sizes[other]), _LEAST) >= MIN_SHARED
            for other, number in shared.items()
        ):
            for kmer in kmers:
                having[kmer].append(len(taken))
            sizes.append(len(kmers))
            taken[one] = place
            if len(taken) == limit:
                break
    return list(taken.values())


def _kmers(sequence: str) -> set[str]:
    return {sequence[n : n + K] for n in range(len(sequence) - K + 1)}
