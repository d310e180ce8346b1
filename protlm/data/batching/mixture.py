"""A mixture of data sets: numbered consecutively, and interleaved by weights."""

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import NamedTuple

import numpy as np

from protlm.data.batching.order import EpochOrder, hashed
from protlm.data.shards.cluster_index import ClusterIndex
from protlm.data.shards.data_set import SplitReader
from protlm.system.errors import UserError

_MAX_CYCLE = 10_000


class Documents(NamedTuple):
    """What documents have: proteins, one document after the other.

    Attributes:
        sizes: number of proteins of each document, int64; perhaps 0.
        leads: whether a protein is the first of a family, bool.
        targets: whether a protein has targets, bool.
        left_out: number of proteins that are left out of the documents, by reason.
    """

    sizes: np.ndarray
    leads: np.ndarray
    targets: np.ndarray
    left_out: dict[str, int]

    def describe(self) -> str:
        families = np.diff(np.append(np.flatnonzero(self.leads), len(self.leads)))
        related = families[families > 1]
        text = (
            f"{len(related):,} of the first {len(self.sizes):,} documents have relatives, "
            f"{related.mean() if len(related) else 0:.1f} proteins each, and the others have "
            f"{len(self.leads) - related.sum():,} proteins, each of which is read alone"
        )
        reasons = [f"{number:,} {why}" for why, number in self.left_out.items() if number]
        return f"{text}; left out are {', '.join(reasons)}" if reasons else text


class Draw(NamedTuple):
    """The samples at some positions, and the pass over its data set of each, both int64.

    There is one sample at each position, or a document, whose samples are joined.
    """

    samples: np.ndarray
    passes: np.ndarray
    documents: Documents | None = None


class SampleOrder:
    """The sample at each position of an epoch: a pure function of the seed.

    The positions of a run repeat a cycle in which each data set has a number of turns according to
    its weight. The turns of a data set draw its samples in the order of passes over it. For a
    single data set, a pass is an epoch.

    With clusters, a pass draws one sequence from each cluster instead, and the pass determines the
    order of the clusters. The members of a cluster take turns, beginning with a random one: after
    as many passes as the cluster has members, each was drawn equally often.

    Args:
        sizes: number of sequences of each data set; the sequences are numbered consecutively.
        shares: turns of each data set in a cycle; one each by default.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        shares: Sequence[int] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        clusters: Sequence[ClusterIndex] | None = None,
    ) -> None:
        assert all(sizes), "a split has at least one sequence"
        assert clusters is None or len(clusters) == len(sizes)
        self.seed, self._shuffle, self._clusters = seed, shuffle, clusters
        self._firsts = np.cumsum(sizes, dtype=np.int64) - np.array(sizes, dtype=np.int64)
        # Number of sequences or clusters that a pass over each data set draws.
        drawn_from = sizes if clusters is None else [len(index) for index in clusters]
        self._sizes = np.array(drawn_from, dtype=np.int64)
        self._shares = np.array(shares or [1] * len(sizes), dtype=np.int64)
        self._turns = round_robin(self._shares.tolist())
        # For each turn of a cycle, the number of earlier turns of its data set.
        self._before = np.zeros_like(self._turns)
        for number in range(len(sizes)):
            self._before[self._turns == number] = np.arange(self._shares[number])

    def __len__(self) -> int:
        """Returns the length of an epoch: the sequences or clusters of all data sets."""
        return int(self._sizes.sum())

    def draw(self, epoch: int, positions: np.ndarray) -> Draw:
        cycles, turns = np.divmod(epoch * len(self) + positions, len(self._turns))
        numbers = self._turns[turns]
        drawn = cycles * self._shares[numbers] + self._before[turns]
        passes, rows = np.divmod(drawn, self._sizes[numbers])
        samples = np.empty_like(rows)
        for number in range(len(self._sizes)):
            for repeat in np.unique(passes[numbers == number]).tolist():
                here = (numbers == number) & (passes == repeat)
                items, key = rows[here], {"seed": self.seed, "stream": number}
                if self._shuffle:
                    items = EpochOrder(int(self._sizes[number]), epoch=repeat, **key)[items]
                if self._clusters is not None:
                    items = self._clusters[number].members(items, hashed(items, **key), repeat)
                samples[here] = self._firsts[number] + items
        return Draw(samples, passes)


def round_robin(shares: Sequence[int]) -> np.ndarray:
    """Spreads turns evenly: after any n turns, each participant had its proportion within 1.

    Turn j of s turns is released at time j/s of the cycle, and of the released turns the one with
    the earliest deadline is next (Baruah et al. 1996, "Proportionate progress").

    >>> round_robin([3, 1]).tolist()
    [0, 0, 0, 1]
    """
    size, had = sum(shares), [0] * len(shares)
    turns = np.empty(size, dtype=np.int64)
    for turn in range(size):
        waiting = [
            (-(-(had[number] + 1) * size // share), number)
            for number, share in enumerate(shares)
            if had[number] * size < (turn + 1) * share
        ]
        _, turns[turn] = min(waiting)
        had[turns[turn]] += 1
    return turns


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Returns the smallest integers in the proportion of decimal weights.

    >>> integer_weights([0.7, 0.3])
    [7, 3]
    """
    for weight in weights:
        if not 0 < weight < float("inf"):
            raise UserError(f"the weight {weight} of a data set must be above 0")
    parts = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(part.denominator for part in parts))
    shares = [int(part * scale) for part in parts]
    shares = [share // gcd(*shares) for share in shares]
    if sum(shares) > _MAX_CYCLE:
        raise UserError(
            f"the weights {', '.join(map(str, weights))} need a cycle of {sum(shares):,} turns, "
            f"and {_MAX_CYCLE:,} are allowed: use fewer digits, for instance 1 and 2.5"
        )
    return shares


class Mixture(SplitReader):
    """The sequences of several splits, numbered consecutively, with `shares` as their weights.

    With clusters, these and a member of each are drawn in place of sequences.
    """

    # What an epoch draws with clusters.
    _of_clusters = "one sequence from each cluster"

    def __init__(
        self,
        splits: Sequence[SplitReader],
        shares: Sequence[int] | None = None,
        clusters: Sequence[ClusterIndex] | None = None,
    ) -> None:
        super().__init__([shard for split in splits for shard in split.shards])
        self._splits, self._shares = tuple(splits), tuple(shares or [1] * len(splits))
        self._clusters = None if clusters is None else tuple(clusters)

    def order(self, *, seed: int = 0, shuffle: bool = True) -> SampleOrder:
        return SampleOrder(
            [len(split) for split in self._splits],
            shares=self._shares,
            seed=seed,
            shuffle=shuffle,
            clusters=self._clusters,
        )

    def describe(self) -> str:
        text = f"{len(self):,} sequences"
        if self.num_clusters is None:
            return text
        return f"{text} in {self.num_clusters:,} clusters; an epoch draws {self._of_clusters}"

    @property
    def num_clusters(self) -> int | None:
        """Number of clusters that an epoch draws from, or None if it draws sequences."""
        return None if self._clusters is None else sum(map(len, self._clusters))

    @property
    def fingerprint(self) -> str:
        """Hash of the data that a position refers to; for a single split, its own hash."""
        parts = [split.fingerprint for split in self._splits]
        if self._clusters is not None:
            indexes = [index.fingerprint for index in self._clusters]
            parts = [f"{part} {index}" for part, index in zip(parts, indexes, strict=True)]
        if len(parts) == 1 and self._clusters is None:
            return parts[0]
        lines = [f"{share} {part}" for share, part in zip(self._shares, parts, strict=True)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
