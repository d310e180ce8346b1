"""Pairwise alignments of relatives to a query: their positions, and what they say without a model.

They are global, with free ends, so that fragments and longer proteins align as well. Residues are
scored by BLOSUM62 (Henikoff and Henikoff 1992), gaps by -11 for their first residue and -1 for each
further one.
"""

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
from Bio.Align import PairwiseAligner, substitution_matrices

from protlm.data.relatives import best_diagonal
from protlm.data.vocabulary import STANDARD, VOCABULARY

_MATRIX = "BLOSUM62"
# Residues without a row in the matrix: selenocysteine, pyrrolysine, and leucine or isoleucine.
_UNKNOWN = str.maketrans("UOJ", "XXX")
# Where residues of two proteins that are aligned begin and end, in each of them.
_Block = tuple[tuple[int, int], tuple[int, int]]
# Pairs of residues of two proteins, beyond which one shift is their alignment: 4,096 each, for
# which an alignment with gaps takes half a second and 100 MB.
_MOST_PAIRS = 1 << 24
_NOWHERE = np.iinfo(np.int32).min
# Alignments that are kept: relatives are in several contexts of a query.
_KEPT = 1024
# Of the distribution of local scores by chance, with this matrix and a gap of k residues at
# -10 - k, which BLAST calls an existence of 10 and an extension of 1.
_LAMBDA, _K = 0.243, 0.024


def aligned_letters(query: str, relatives: Sequence[str], *, has_gaps: bool = True) -> np.ndarray:
    """Returns the letter of each relative that is aligned to each residue of the query.

    Args:
        query: residues in capitals; X is one that the alignment must not see.
        relatives: residues in capitals.
        has_gaps: otherwise, and if there are more than 2^24 pairs of residues, a relative is
            aligned along its `best_diagonal` alone.

    Returns:
        uint8 [relatives, residues of the query], 0 where a relative has none.

    >>> aligned_letters("MKTAYIXKQR", ["TAYIAKQRQI"]).tobytes()
    b'\\x00\\x00TAYIAKQR'
    >>> aligned_letters("MKTAYIAKQR", ["MKTAGYIAKQR"], has_gaps=False).tobytes()
    b'KTAGYIAKQR'
    """
    letters = np.zeros((len(relatives), len(query)), np.uint8)
    for row, relative in zip(letters, relatives, strict=True):
        residues = np.frombuffer(relative.encode(), np.uint8)
        for (start, end), (begin, finish) in _blocks(query, relative, has_gaps):
            row[start:end] = residues[begin:finish]
    return letters


def aligned_positions(query: str, relative: str, *, has_gaps: bool = True) -> np.ndarray:
    """Returns the position in a query of each residue of a relative, as `Relative.columns`.

    Args:
        query: residues in capitals; X is one that the alignment must not see.
        relative: residues in capitals.
        has_gaps: as for `aligned_letters`.

    Returns:
        int32 [residues of the relative], never falling.

    >>> aligned_positions("MKTAYIAKQRQISF", "GGMKTAYIGGGAKQRQISFV").tolist()
    [-2, -1, 0, 1, 2, 3, 4, 5, 5, 5, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    """
    places = np.full(len(relative), _NOWHERE, np.int32)
    for (start, end), (begin, finish) in _blocks(query, relative, has_gaps):
        places[begin:finish] = np.arange(start, end)
    known = np.flatnonzero(places != _NOWHERE)
    if not len(known):
        return np.arange(len(relative), dtype=np.int32)
    first, last = known[[0, -1]]
    places[:first] = places[first] - np.arange(first, 0, -1)
    places[last:] = places[last] + np.arange(len(relative) - last)
    return np.maximum.accumulate(places)


def identities(query: str, letters: np.ndarray) -> np.ndarray:
    """Returns the fraction of the known residues of a query that each relative has in its place.

    Args:
        query: residues; X is unknown.
        letters: those of relatives, as of `aligned_letters`.

    >>> identities("MKX", np.frombuffer(b"MKAMAA", np.uint8).reshape(2, 3)).tolist()
    [1.0, 0.5]
    """
    own = np.frombuffer(query.encode(), np.uint8)
    is_known = own != ord("X")
    return (letters[:, is_known] == own[is_known]).mean(1)


def e_value(query: str, relative: str) -> float:
    """Returns the number of local alignments that score as well by chance, in two proteins.

    It is K m n exp(-λ S) for lengths m and n and the best local score S (Karlin and Altschul 1990),
    with the λ = 0.243 and K = 0.024 that NCBI BLAST has for these gaps (Altschul et al. 2001,
    Nucleic Acids Research 29:351). Composition is not corrected for. It is 0 for more than 2^24
    pairs of residues, or for none, which are not compared.

    Two tryptophans score 22, and the residues around them no more:

    >>> f"{e_value('MWWC', 'WWWA'):.6f} = {0.024 * 4 * 4 * math.exp(-0.243 * 22):.6f}"
    '0.001831 = 0.001831'
    """
    pairs = len(query) * len(relative)
    if not 0 < pairs <= _MOST_PAIRS:
        return 0.0
    score = _aligner("local").score(query.translate(_UNKNOWN), relative.translate(_UNKNOWN))
    return _K * pairs * math.exp(-_LAMBDA * score)


def substitutions(frequencies: np.ndarray) -> np.ndarray:
    """Returns the probability of a residue, given the one of a relative in its place.

    It is P(a | b) ∝ f(a) 2^(S(a, b) / 2), since scores of BLOSUM62 are half bits.

    Args:
        frequencies: f of the residues in `STANDARD`, float64 [20].

    Returns:
        float64 [20 of relatives, 20].
    """
    scores: Any = substitution_matrices.load(_MATRIX)
    table = np.array([[scores[b, a] for a in STANDARD] for b in STANDARD])
    joint = frequencies * 2 ** (table / 2)
    return joint / joint.sum(1, keepdims=True)


@lru_cache(maxsize=_KEPT)
def _blocks(query: str, relative: str, has_gaps: bool) -> Sequence[_Block]:
    if has_gaps and 0 < len(query) * len(relative) <= _MOST_PAIRS:
        # Of equally good alignments, the first.
        found = next(
            iter(_aligner("global").align(*(x.translate(_UNKNOWN) for x in (query, relative))))
        )
        return tuple(zip(*found.aligned, strict=True))
    shift = best_diagonal(VOCABULARY.encode(query), VOCABULARY.encode(relative))
    start, end = max(shift, 0), min(shift + len(relative), len(query))
    return [((start, end), (start - shift, end - shift))]


@cache
def _aligner(mode: str) -> PairwiseAligner:
    aligner = PairwiseAligner(mode=mode, open_gap_score=-11, extend_gap_score=-1)
    if mode == "global":
        aligner.end_gap_score = 0
    aligner.substitution_matrix = substitution_matrices.load(_MATRIX)
    return aligner
