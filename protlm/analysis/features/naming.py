"""Which features are active at which concepts: precision, recall and F1, beside chance.

Activities are divided by their maximum and compared with the thresholds of InterPLM (Simon and Zou
2025, doi:10.1038/s41592-025-02836-7), whose recall is that of domains: runs of residues of a
concept. Everything is chosen on one half of the proteins, and reported on the other.
"""

from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array, issparse

from protlm.analysis.bootstrap import ratio_of

# A NumPy array, [residues, features], or a sparse one of SciPy.
Activities = Any
THRESHOLDS = (0.0, 0.15, 0.5, 0.6, 0.8)
_BLOCK = 1 << 15
# Annotations are exchanged between this number of proteins of the most similar lengths.
_ALIKE = 10


class Concepts(NamedTuple):
    """Which residues have which concepts, bool [residues, concepts], and their proteins.

    The half of the even proteins is for choosing, and that of the odd ones is reported.
    """

    names: list[str]
    present: np.ndarray
    protein: np.ndarray

    def rows(self, side: int) -> np.ndarray:
        """Returns the residues of a half, 0 or 1."""
        return np.flatnonzero(self.protein % 2 == side)

    def exchanged(self, rng: np.random.Generator) -> "Concepts":
        """Returns them with annotations exchanged between proteins of like length, in each half.

        Each residue gets those of the one as far from the nearer terminus of another protein.
        """
        lengths = np.bincount(self.protein)
        starts, source = np.cumsum(lengths) - lengths, np.zeros_like(self.protein)
        for side in (0, 1):
            own = np.argsort(lengths[side::2], kind="stable") * 2 + side
            for some in np.array_split(own, max(1, len(own) // _ALIKE)):
                ring = rng.permutation(some).tolist()
                for one, other in zip(ring, ring[1:] + ring[:1], strict=True):
                    at, more = np.arange(int(lengths[one])), int(lengths[other] - lengths[one])
                    place = np.where(2 * at < len(at), at, at + more).clip(0, lengths[other] - 1)
                    source[starts[one] + at] = starts[other] + place
        return self._replace(present=self.present[source])


def column(values: Activities, number: int) -> np.ndarray:
    """Returns the activity of a feature at all residues."""
    found = values[:, [number]]
    return (found.toarray() if issparse(found) else found)[:, 0]


def compare(
    values: Activities, concepts: Concepts, repeats: int, *, seed: int
) -> list[dict[str, Any]]:
    """Compares activities, [residues, features], with concepts; negative ones count as 0.

    Returns the figures of the feature that is chosen for each concept, and of all features with a
    name: the concept at which F1 less the bar is highest in the half for choosing, if F1 in the
    other half is above the bar; F1 in the half for choosing need not be. `F1 of draws` is for
    paired comparisons. The bar is of chance:
    the whole choice is repeated with exchanged annotations, and the best F1 of all features taken.
    The bar is its mean plus as many standard deviations as makes the largest excess among all
    concepts (max T of Westfall and Young 1993) rank among the highest 5 % of those of the repeats,
    so that in about 19 of 20 tables no name is by chance. The excess of a repeat is over the
    others: one that counts in its own mean and deviation looks smaller than that of a table that
    does not. The rank is approximate, since the table itself is over all repeats, one more. The bar
    is at least the F1 of every residue.
    """
    levels = _levels(values, concepts.rows(0))
    halves = [levels[concepts.rows(side)] for side in (0, 1)]
    threshold, chosen, f1 = _chosen(halves, concepts)
    best = _best_by_chance(halves, concepts, repeats, seed)
    others = [_spread(np.delete(best, number, axis=0)) for number in range(repeats)]
    excess = [((own - m) / d).max() for own, (m, d) in zip(best, others, strict=True)]
    mean, deviation = _spread(best)
    bar = mean + deviation * np.sort(excess)[-((repeats + 1) // 20)]
    present = concepts.present[concepts.rows(1)]
    bar = np.maximum(bar, 2 * present.sum(axis=0) / (len(present) + present.sum(axis=0)))
    chosen_for = list(zip(chosen.argmax(axis=0).tolist(), range(len(bar)), strict=True))
    names = enumerate((chosen - bar).argmax(axis=1).tolist())
    named = [(number, place) for number, place in names if f1[number, place] > bar[place]]
    reported = halves[1].tocsc() if issparse(levels) else halves[1]
    rows = []
    for number, place in dict.fromkeys([*chosen_for, *named]):
        level, least = threshold[number, place], float(bar[place])
        found = _figures(column(reported, number) > level, concepts, place)
        rows.append(
            {
                "concept": concepts.names[place],
                "feature": number,
                "threshold": THRESHOLDS[level],
                **found,
                "by chance": least,
                "chosen": (number, place) in chosen_for,
                "named": found["F1"] > least,
            }
        )
    return rows


def _best_by_chance(
    halves: list[Activities], concepts: Concepts, repeats: int, seed: int
) -> np.ndarray:
    """Returns the best F1 of all features with exchanged annotations, [repeats, concepts]."""
    size, found = len(concepts.names), []
    draws = (np.random.default_rng([seed, number]) for number in range(repeats))
    # Of 500 columns at once, since each call compares all activities with the thresholds.
    while some := [*islice(draws, max(1, 500 // size))]:
        present = np.concatenate([concepts.exchanged(rng).present for rng in some], axis=1)
        best = _chosen(halves, concepts._replace(present=present))[2].max(axis=0)
        found.append(best.reshape(-1, size))
    return np.concatenate(found)


def _spread(best: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # An F1 that is 0 in all repeats but one does not decide alone.
    return best.mean(axis=0), best.std(axis=0, ddof=1) + 1e-3


def _figures(active: np.ndarray, concepts: Concepts, place: int) -> dict[str, Any]:
    """Returns the figures of active residues of the reported half, with F1 over proteins."""
    rows = concepts.rows(1)
    present, protein = concepts.present[rows, place], concepts.protein[rows]
    both = present & active
    f1 = ratio_of("F1", *(np.bincount(protein, x)[1::2] for x in (2 * both, 1 * present + active)))
    goes_on = np.append(False, present[:-1] & (protein[1:] == protein[:-1]))
    domain = np.cumsum(present & ~goes_on)
    precision = float(both.sum() / max(active.sum(), 1))
    of_domains = len(np.unique(domain[both])) / int(domain[-1])
    found = {"precision": precision, "recall": float(both.sum() / present.sum())}
    f1_of_domains = 2 * precision * of_domains / max(precision + of_domains, 1e-12)
    found |= {"recall of domains": of_domains, "F1 of domains": f1_of_domains}
    low, high = f1.interval("F1")
    return found | {**f1.values, "low": low, "high": high, "F1 of draws": f1}


def _levels(values: Activities, chosen: np.ndarray) -> Activities:
    """Returns how many thresholds each activity exceeds, uint8."""
    top = values[chosen].max(axis=0)
    top = np.maximum(top.toarray() if issparse(top) else top, 1e-12).reshape(-1)
    if not issparse(values):
        return sum((values > t * top).astype(np.uint8) for t in THRESHOLDS)
    data = sum((values.data > t * top[values.indices]).astype(np.uint8) for t in THRESHOLDS)
    return csr_array((data, values.indices, values.indptr), shape=values.shape)


def _chosen(
    halves: list[Activities], concepts: Concepts
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the best thresholds for choosing, and the F1 of both halves with them."""
    found = []
    for side, levels in enumerate(halves):
        present = concepts.present[concepts.rows(side)]
        both = np.insert(present, 0, True, axis=1).astype(np.float32)
        blocks = [slice(start, start + _BLOCK) for start in range(0, len(both), _BLOCK)]
        counts = [
            sum((levels[block] > t).astype(np.float32).T @ both[block] for block in blocks)
            for t in range(len(THRESHOLDS))
        ]
        active, hits = np.split(np.stack(counts), [1], axis=2)
        found.append(2 * hits / np.maximum(active + present.sum(axis=0), 1))
    best = found[0].argmax(axis=0)[None]
    return best[0], *(np.take_along_axis(f1, best, axis=0)[0] for f1 in found)
