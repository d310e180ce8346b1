"""Which features are active at which concepts: precision, recall and F1, beside chance.

Activities are divided by their maximum and compared with the thresholds of InterPLM (Simon and Zou
2025, doi:10.1038/s41592-025-02836-7), whose recall is that of domains: runs of residues of a
concept. Everything is chosen on one half of the proteins, and reported on the other.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array, issparse

from protlm.analysis.bootstrap import ratio_interval

# A NumPy array, [residues, features], or a sparse one of SciPy.
Activities = Any
THRESHOLDS = (0.0, 0.15, 0.5, 0.6, 0.8)
_BLOCK = 1 << 15
# Annotations are exchanged between this number of proteins of the most similar lengths.
_ALIKE = 10


class Concepts(NamedTuple):
    """Concepts of residues: bool [residues, concepts], and the protein of each residue.

    Those of even proteins are for choosing, and those of odd ones are reported.
    """

    names: list[str]
    known: np.ndarray
    present: np.ndarray
    protein: np.ndarray

    def rows(self, side: int) -> np.ndarray:
        """Returns the residues of a half, 0 or 1."""
        return np.flatnonzero(self.protein % 2 == side)

    def exchanged(self, rng: np.random.Generator) -> "Concepts":
        """Returns them with annotations exchanged between proteins of like length, in each half."""
        lengths = np.bincount(self.protein)
        starts, source = np.cumsum(lengths) - lengths, np.full(len(self.protein), -1)
        for side in (0, 1):
            own = np.argsort(lengths[side::2], kind="stable") * 2 + side
            for some in np.split(own, range(_ALIKE, len(own), _ALIKE)):
                for one, other in zip(some, rng.permutation(some), strict=True):
                    both = np.arange(int(min(lengths[one], lengths[other])))
                    source[starts[one] + both] = starts[other] + both
        known = self.known[source] & (source >= 0)[:, None]
        return self._replace(known=known, present=self.present[source] & known)


class Scores(NamedTuple):
    """The best thresholds, and their F1 in the half for choosing; counts of the reported half.

    `hits`, `active` and `present` count residues: both, those above the threshold, and those of the
    concept, [concepts]. The others are [features, concepts]; `f1` is 2 hits / (active + present).
    """

    threshold: np.ndarray
    chosen: np.ndarray
    f1: np.ndarray
    hits: np.ndarray
    active: np.ndarray
    present: np.ndarray


class Named(NamedTuple):
    """What features, or a control, are active at, in the reported half.

    `touched` counts the `domains` of a concept with an active residue; `bar` is that of `chance`.
    """

    levels: Activities
    scores: Scores
    touched: np.ndarray
    domains: np.ndarray
    bar: np.ndarray

    def pairs(self) -> list[tuple[int, int]]:
        """Returns the feature that is chosen for each concept, and all features with a name.

        A name is the concept that is chosen for a feature, if F1 is above chance there.
        """
        chosen, f1 = self.scores.chosen, self.scores.f1
        of_features = enumerate(chosen.argmax(axis=1).tolist())
        named = [(one, place) for one, place in of_features if f1[one, place] > self.bar[place]]
        best = zip(chosen.argmax(axis=0).tolist(), range(len(self.bar)), strict=True)
        return list(dict.fromkeys([*best, *named]))

    def figures(self, number: int, place: int, concepts: Concepts) -> dict[str, Any]:
        """Returns the figures of a feature at a concept, with the interval of F1 over proteins."""
        at, rows, scores = (number, place), concepts.rows(1), self.scores
        column, known = self.levels[:, [number]] > scores.threshold[at], concepts.known[rows, place]
        active = (column.toarray() if issparse(column) else column)[:, 0] & known
        present = concepts.present[rows, place] & known
        weights = 2 * (present & active), 1 * present + active
        totals, counts = (np.bincount(concepts.protein[rows], x)[1::2] for x in weights)
        f1, precision = ratio_interval(totals, counts), scores.hits[at] / max(scores.active[at], 1)
        of_domains = self.touched[at] / self.domains[place]
        return {
            "concept": concepts.names[place],
            "feature": number,
            "threshold": THRESHOLDS[scores.threshold[at]],
            "precision": precision,
            "recall": scores.hits[at] / scores.present[place],
            "recall of domains": of_domains,
            "F1 of domains": 2 * precision * of_domains / max(precision + of_domains, 1e-12),
            "F1": f1["mean"],
            "low": f1["low"],
            "high": f1["high"],
            "by chance": float(self.bar[place]),
            "named": bool(f1["mean"] > self.bar[place]),
        }


def compare(values: Activities, concepts: Concepts, repeats: int, *, seed: int) -> Named:
    """Compares activities, [residues, features], with concepts; negative ones count as 0."""
    levels = _levels(values, concepts.rows(0))
    scores = _score(levels, concepts)
    reported = levels[concepts.rows(1)]
    reported = reported.tocsc() if issparse(reported) else reported
    touched = _touched_domains(levels, concepts, scores.threshold)
    return Named(reported, scores, *touched, chance(levels, concepts, repeats, seed=seed))


def _levels(values: Activities, chosen: np.ndarray) -> Activities:
    """Returns how many thresholds each activity exceeds, uint8."""
    top = values[chosen].max(axis=0)
    top = np.maximum(top.toarray() if issparse(top) else top, 1e-12).reshape(-1)
    if not issparse(values):
        return sum((values > t * top).astype(np.uint8) for t in THRESHOLDS)
    scaled = values.data / top[values.indices]
    data = sum((scaled > t).astype(np.uint8) for t in THRESHOLDS)
    return csr_array((data, values.indices, values.indptr), shape=values.shape)


def _score(levels: Activities, concepts: Concepts) -> Scores:
    known, present = concepts.known, concepts.known & concepts.present
    both, halves = np.concatenate([present, known], axis=1).astype(np.float32), []
    for side in (0, 1):
        rows = concepts.rows(side)
        blocks = np.split(rows, range(_BLOCK, len(rows), _BLOCK))
        counts = [
            sum((levels[block] > t).astype(np.float32).T @ both[block] for block in blocks)
            for t in range(len(THRESHOLDS))
        ]
        hits, active = np.split(np.stack(counts).astype(np.float64), 2, axis=2)
        total = present[rows].sum(axis=0)
        halves.append((2 * hits / np.maximum(active + total, 1), hits, active, total))
    best = halves[0][0].argmax(axis=0)[None]
    chosen, f1, hits, active = (
        np.take_along_axis(x, best, axis=0)[0] for x in (halves[0][0], *halves[1][:3])
    )
    return Scores(best[0], chosen, f1, hits, active, halves[1][3])


def chance(levels: Activities, concepts: Concepts, repeats: int, *, seed: int) -> np.ndarray:
    """Returns the F1 that a feature has to exceed at each concept, [concepts].

    The whole choice is repeated with exchanged annotations, and the best F1 of all features taken.
    The bar is its mean plus the 95 % quantile, over repeats, of the largest excess over that mean
    among all concepts: in 19 of 20 tables no name is by chance.
    """
    draws = (np.random.default_rng([seed, number]) for number in range(repeats))
    best = np.stack([_score(levels, concepts.exchanged(rng)).f1.max(axis=0) for rng in draws])
    mean = best.mean(axis=0)
    return mean + np.quantile((best - mean).max(axis=1), 0.95)


def _touched_domains(
    levels: Activities, concepts: Concepts, threshold: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    touched, number, rows = np.zeros(threshold.shape), [], concepts.rows(1)
    for place in range(len(concepts.names)):
        own = rows[(concepts.present & concepts.known)[rows, place]]
        is_first = (np.diff(own, prepend=-2) > 1) | (np.diff(concepts.protein[own], prepend=-1) > 0)
        domain = np.cumsum(is_first) - 1
        number.append(is_first.sum())
        members = csr_array((np.ones(len(own), np.float32), (domain, np.arange(len(own)))))
        for t in range(len(THRESHOLDS)):
            hits = np.asarray(((members @ (levels[own] > t).astype(np.float32)) > 0).sum(axis=0))
            touched[:, place] += hits * (threshold[:, place] == t)
    return touched, np.array(number)
