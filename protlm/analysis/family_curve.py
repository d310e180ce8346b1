"""Predictions of queries by the number of relatives: means over families, and paired differences.

Intervals are over families, and there is none of fewer than 20.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from protlm.analysis.bootstrap import MODEL, ratio_interval
from protlm.analysis.family_predictions import (
    PREDICTORS,
    SHARES,
    Background,
    Scores,
    cross_fitted,
    family_means,
    mixture,
    scores,
)
from protlm.analysis.family_queries import FamilyQuery
from protlm.data.tables import write_table

# Mixtures of the columns with the model alone, and with the model that sees the same relatives.
MIXED_ALONE, MIXED = "mixed alone", "mixed"
_FEWEST = 20
# The label of a context, and a predictor.
Key: TypeAlias = tuple[str, str]


@dataclass
class FamilyCurve:
    """What is predicted at the targets of queries, by label of a context and by predictor.

    Args:
        queries: of at least two families.
        background: what is known without relatives.
        numbers: of the relatives of each query, by label of a context.
    """

    queries: Sequence[FamilyQuery]
    background: Background
    numbers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    scores: dict[Key, Scores] = field(default_factory=dict)
    fitted: dict[str, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def num_targets(self) -> np.ndarray:
        return np.array([len(query.places) for query in self.queries])

    @cached_property
    def families(self) -> np.ndarray:
        """The number of the family of each query, from 0 in their order."""
        names = [query.family for query in self.queries]
        order = [*dict.fromkeys(names)]
        return np.array([order.index(name) for name in names])

    def add_baselines(
        self,
        label: str,
        numbers: Sequence[int],
        alone: Sequence[np.ndarray],
        model: Sequence[np.ndarray],
    ) -> None:
        """Adds what the first relatives of each query predict, and mixtures with the model.

        Args:
            label: of the context.
            numbers: of relatives, for each query.
            alone: probabilities of the model without relatives, [targets, 20] of each query.
            model: those with these relatives.
        """
        pairs = [*zip(self.queries, numbers, strict=True)]
        found = list[np.ndarray]()
        for who, (predict, grid, is_shifted) in PREDICTORS.items():
            evidence = [query.evidence(number, is_shifted=is_shifted) for query, number in pairs]
            each = ([predict(one, self.background, value) for one in evidence] for value in grid)
            found = self._add_fitted(label, who, grid, [*each])
        for who, others in ((MIXED_ALONE, alone), (MIXED, model)):
            each = ([*map(partial(mixture, share), found, others)] for share in SHARES)
            self._add_fitted(label, who, SHARES, [*each])

    def _add_fitted(
        self, label: str, who: str, grid: Sequence[Any], each: Sequence[Sequence[np.ndarray]]
    ) -> list[np.ndarray]:
        """Adds the predictions of the value of a grid that is best for the other families.

        `each` has the probabilities of every value and query; those that count are returned.
        """
        targets = [query.targets for query in self.queries]
        nats = np.array([scores(one, targets).nats for one in each])
        taken = cross_fitted(nats, self.num_targets, self.families)
        found = [each[value][query] for query, value in enumerate(taken)]
        self.scores[label, who] = scores(found, targets)
        self.fitted.setdefault(label, {})[who] = grid[int(np.bincount(taken).argmax())]
        return found

    def means(self, label: str, who: str = MODEL) -> np.ndarray:
        """Returns the nats per target of each family, float64 [families]."""
        return family_means(self.scores[label, who].nats, self.num_targets, self.families)

    def figures(self, label: str, who: str, seed: int) -> dict[str, Any]:
        """Returns the means over families of nats, with their interval, and of correct ones."""
        nats = _over_families(self.means(label, who), seed)
        right = family_means(self.scores[label, who].correct, self.num_targets, self.families)
        return {
            "nats": nats,
            "perplexity": math.exp(nats["mean"]),
            "accuracy": float(right.mean()),
        }

    def difference(self, one: Key, other: Key, seed: int) -> dict[str, Any]:
        """Returns the mean over families of the nats of one predictor less those of another."""
        return _over_families(self.means(*one) - self.means(*other), seed)

    def share_closed(self, one: Key, alone: Key, columns: Key, seed: int) -> dict[str, Any]:
        """Returns the share of the mean distance from `alone` to `columns` that a model closes."""
        near, far = (self.means(*alone) - self.means(*key) for key in (one, columns))
        if far.sum() <= 0:
            return {"mean": None, "low": None, "high": None, "count": len(far)}
        return _over_families(near, seed, counts=far)

    def bins(self, pairs: Mapping[str, tuple[Key, Key]], seed: int) -> dict[str, Any]:
        """Returns differences by the highest identity of any candidate of a query."""
        found, of_query = {}, np.array([query.bin for query in self.queries])
        for one in sorted({*of_query}):
            some = np.flatnonzero(of_query == one).tolist()
            part = FamilyCurve([self.queries[n] for n in some], self.background)
            for key, sums in self.scores.items():
                part.scores[key] = Scores(sums.nats[some], sums.correct[some])
            found[one] = {
                "queries": len(some),
                "families": int(part.families.max()) + 1,
                **{name: part.difference(*pair, seed) for name, pair in pairs.items()},
            }
        return found

    def write(self, path: Path) -> None:
        """Writes a table of the nats of each query, to compare models on the same targets."""
        names = [f"{who}, {label}" for label, who in self.scores]
        sums = np.array([one.nats for one in self.scores.values()]).T.tolist()
        rows = [
            [
                *(query.name, query.family, f"{query.highest:.3f}", str(len(query.places))),
                *(",".join(one.name for one in query.order), *map(str, nats)),
            ]
            for query, nats in zip(self.queries, sums, strict=True)
        ]
        columns = ("accession", "family", "highest_identity", "targets", "relatives", *names)
        write_table(path, columns, rows)


def _over_families(
    values: np.ndarray, seed: int, *, counts: np.ndarray | None = None
) -> dict[str, Any]:
    found = ratio_interval(values, counts, seed=seed)
    return found if len(values) >= _FEWEST else found | {"low": None, "high": None}
