"""What relatives predict of masked residues without a model, and mixtures with what a model does.

Every predictor has a parameter, of which all values of a grid are tried. The one that counts for a
query is the best for all other families (`cross_fitted`). Probabilities are of the residues in
`STANDARD`; the frequencies of the training split are what is known without a relative.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from protlm.data.families import num_neighbors
from protlm.data.pairwise import substitutions
from protlm.data.vocabulary import STANDARD

# The number of each letter in `STANDARD`, or -1.
NUMBERS = np.full(256, -1)
NUMBERS[[*STANDARD.encode()]] = np.arange(len(STANDARD))


@dataclass(frozen=True)
class Background:
    """The frequencies of residues, float64 [20], and those of substitutions, [20, 20]."""

    frequencies: np.ndarray

    @cached_property
    def substitutions(self) -> np.ndarray:
        return substitutions(self.frequencies)


@dataclass(frozen=True)
class Evidence:
    """What the relatives of a query have at its targets.

    Args:
        residues: all residues of the relatives, joined.
        letters: those that are aligned to the query, uint8 [relatives, residues of the query].
        places: those of the targets in the query, int64 [targets].
        identities: of the relatives to the query, as it is known without the targets.
    """

    residues: str
    letters: np.ndarray
    places: np.ndarray
    identities: np.ndarray

    @cached_property
    def counts(self) -> np.ndarray:
        """Weighted counts of the residues in the columns of the targets, float64 [targets, 20]."""
        counts = np.zeros((len(self.places), len(STANDARD)))
        weights = 1 / num_neighbors(self.letters)
        for row, weight in zip(NUMBERS[self.letters[:, self.places]], weights, strict=True):
            known = np.flatnonzero(row >= 0)
            counts[known, row[known]] += weight
        return counts


def composition(evidence: Evidence, background: Background, known: float) -> np.ndarray:
    """Predicts the frequencies of the relatives' residues, of which `known` are counted before."""
    numbers = NUMBERS[[*evidence.residues.encode()]]
    counts = np.bincount(numbers[numbers >= 0], minlength=len(STANDARD))
    found = counts + known * background.frequencies
    return np.tile(found / found.sum(), (len(evidence.places), 1))


def columns(
    evidence: Evidence, background: Background, pseudo_counts: tuple[float, float]
) -> np.ndarray:
    """Predicts the frequencies of columns (PSI-BLAST, Altschul et al. 1997, with three terms).

    To the counts come two pseudo-counts: of what the residues of the column are replaced by, and of
    the frequencies of all proteins. Relatives weigh 1/neighbors at 80 % identity.
    """
    counts = evidence.counts
    sums = counts.sum(1, keepdims=True)
    replaced = counts @ background.substitutions / np.maximum(sums, 1e-9)
    of_column, of_all = pseudo_counts
    found = counts + of_column * replaced + of_all * background.frequencies
    return found / found.sum(1, keepdims=True)


def nearest(evidence: Evidence, background: Background, shares: tuple[float, float]) -> np.ndarray:
    """Predicts the residue of the most similar relative that has one there, or what replaces it.

    The shares are those of what replaces it, and of the frequencies of all proteins, which are all
    that is known where no relative has a residue.
    """
    replaced, unknown = shares
    table = replaced * background.substitutions + (1 - replaced) * np.eye(len(STANDARD))
    found = np.tile(background.frequencies, (len(evidence.places), 1))
    # From the least similar one on, so that the most similar one is the last.
    for row in NUMBERS[evidence.letters[evidence.identities.argsort()][:, evidence.places]]:
        found[row >= 0] = table[row[row >= 0]]
    return (1 - unknown) * found + unknown * background.frequencies


# Tenths.
_SHARES = tuple(np.linspace(0, 1, 11).tolist())


_PSEUDO_COUNTS = tuple(product((0.5, 1.0, 2.0, 5.0, 10.0, 20.0), (0.1, 0.3, 1.0, 3.0, 10.0)))


class Predictor(NamedTuple):
    """A predictor, the values of its parameter that are tried, and which letters it is given."""

    predict: Callable[[Evidence, Background, Any], np.ndarray]
    grid: Sequence[Any]
    is_shifted: bool = False


PREDICTORS: Mapping[str, Predictor] = {
    "composition": Predictor(composition, (10.0, 30.0, 100.0, 300.0, 1_000.0, 3_000.0)),
    "nearest": Predictor(nearest, tuple(product(_SHARES[1:], _SHARES[:-1]))),
    # Those without gaps are what models with aligned positions are given.
    "diagonal": Predictor(columns, _PSEUDO_COUNTS, is_shifted=True),
    "columns": Predictor(columns, _PSEUDO_COUNTS),
}
# Shares of the columns in a mixture.
SHARES = tuple(np.linspace(0, 1, 21).tolist())


def mixture(share: float, columns: np.ndarray, model: np.ndarray) -> np.ndarray:
    """Returns the mean of probabilities, of which the columns have a share."""
    return share * columns + (1 - share) * model


class Scores(NamedTuple):
    """Sums over the targets of each query, float64 [queries]: nats, and correct predictions."""

    nats: np.ndarray
    correct: np.ndarray


def scores(probabilities: Iterable[np.ndarray], targets: Iterable[np.ndarray]) -> Scores:
    """Scores predictions, [targets, 20] of each query, of the residues that it has there."""
    pairs = [
        (-np.log(p[np.arange(len(own)), own]).sum(), (p.argmax(1) == own).sum())
        for p, own in zip(probabilities, targets, strict=True)
    ]
    return Scores(*np.array(pairs, np.float64).T)


def cross_fitted(nats: np.ndarray, num_targets: np.ndarray, families: np.ndarray) -> np.ndarray:
    """Returns the number of the value that each query takes: the best one for other families.

    Args:
        nats: sums over the targets of each query, for each value of a grid, [values, queries].
        num_targets: their numbers, [queries].
        families: the number of the family of each query, from 0.
    """
    means = family_means(nats, num_targets, families)
    others = means.sum(axis=1, keepdims=True) - means
    return others.argmin(axis=0)[families]


def family_means(totals: np.ndarray, counts: np.ndarray, families: np.ndarray) -> np.ndarray:
    """Returns the mean of each family, [..., families], of sums over its queries, [..., queries].

    >>> family_means(np.array([1.0, 5.0, 8.0]), np.array([1, 2, 4]), np.array([0, 0, 1])).tolist()
    [2.0, 2.0]
    """
    is_of = families == np.arange(families.max() + 1)[:, None]
    return (totals @ is_of.T) / (is_of @ counts)
