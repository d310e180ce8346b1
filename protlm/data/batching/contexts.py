"""Contexts for validation: relatives from another split, without those that leak the protein."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import final

import numpy as np

from protlm.data.batching.mixture import Draw, Mixture, SampleOrder
from protlm.data.batching.order import hashed, splitmix64
from protlm.data.batching.plan import SPECIALS
from protlm.data.batching.relatives import WholeFamilies, drawn, members_of
from protlm.data.relatives import leaks
from protlm.data.shards.cluster_index import ClusterIndex
from protlm.data.shards.data_set import SplitReader

# Proteins whose clusters are looked up at a time.
_LOOKUPS = 4_096


@final
class Contexts(Mixture):
    """The proteins of a split, `queries`, and their relatives in another split of the data set.

    Only the queries have targets. Relatives are the members of the cluster of the same name.
    Cluster indexes do not have the names, but the shards have their hashes, by which the clusters
    of an index are sorted.
    """

    def __init__(
        self, context: SplitReader, index: ClusterIndex, queries: SplitReader, rule: WholeFamilies
    ) -> None:
        super().__init__([context, queries])
        self.context, self.index, self.queries = context, index, queries
        self.rule = replace(rule, alone=0.0, last=1.0)

    def order(self, *, seed: int = 0, shuffle: bool = True) -> "ContextOrder":
        return ContextOrder(self, seed=seed, shuffle=shuffle)

    def has_relatives(self) -> bool:
        """Returns whether a query has a relative."""
        number = len(self.queries)
        return any(
            np.any(self.clusters(np.arange(first, min(first + _LOOKUPS, number))) >= 0)
            for first in range(0, number, _LOOKUPS)
        )

    def clusters(self, queries: np.ndarray) -> np.ndarray:
        """Returns the number of the cluster of each query in the index, or -1, int64."""
        wanted = self.queries.clusters_of(queries)
        # The number of clusters with smaller hashes, bit by bit from the highest one on.
        before, size = np.zeros(len(wanted), np.int64), len(self.index)
        for bit in reversed(range(size.bit_length())):
            more = before + (1 << bit)
            is_before = (more <= size) & (self._hashes(more - 1) < wanted)
            before = np.where(is_before, more, before)
        return np.where(self._hashes(before) == wanted, np.minimum(before, size - 1), -1)

    def _hashes(self, clusters: np.ndarray) -> np.ndarray:
        """Returns the hashes of clusters, and of the last one for a number after it."""
        clusters = np.minimum(clusters, len(self.index) - 1)
        first = self.index.members(clusters, np.zeros(len(clusters), np.uint64), 0)
        return self.context.clusters_of(first)


@final
class ContextOrder(SampleOrder):
    """The document at each position: a protein, after relatives whose order the seed decides."""

    def __init__(self, contexts: Contexts, *, seed: int, shuffle: bool) -> None:
        super().__init__([len(contexts.queries)], seed=seed, shuffle=shuffle)
        self._contexts = contexts
        # Comparing relatives takes seconds for a thousand queries, and each validation draws them.
        self._drawn = cache(self._draw)

    def draw(self, epoch: int, positions: np.ndarray) -> Draw:
        return self._drawn(epoch, positions.astype(np.int64).tobytes())

    def _draw(self, epoch: int, positions: bytes) -> Draw:
        queries, passes, _ = super().draw(epoch, np.frombuffer(positions, np.int64))
        contexts, rule = self._contexts, self._contexts.rule
        clusters = contexts.clusters(queries)
        # Those that are too long are left out with their relatives.
        is_short = contexts.queries.lengths_of(queries) + SPECIALS <= rule.max_length
        having = np.flatnonzero((clusters >= 0) & is_short)
        keys = splitmix64(passes.astype(np.uint64))
        keys = splitmix64(keys ^ hashed(queries, seed=self.seed))
        numbers, samples = members_of(
            contexts.index, clusters[having], keys[having], most=rule.members - 1
        )
        numbers = having[numbers]
        reasons = list[str]()
        for number in np.unique(numbers).tolist():
            others = samples[numbers == number].tolist()
            query = contexts.queries[int(queries[number])]
            reasons += leaks(query, [contexts.context[other] for other in others])
        is_safe = np.array([not why for why in reasons], bool)
        members = (
            np.concatenate([np.arange(len(queries)), numbers[is_safe]]),
            np.concatenate([len(contexts.context) + queries, samples[is_safe]]),
        )
        kinds, counts = np.zeros(len(queries)), Counter(filter(None, reasons))
        return drawn(contexts, rule, members, passes, kinds, dict(counts))
