"""Several data sets as one: numbered through, and interleaved by weights."""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from itertools import accumulate
from math import gcd, lcm
from typing import NamedTuple, final

import numpy as np

from protlm.data.order import EpochOrder
from protlm.data.split_reader import SplitReader
from protlm.errors import UserError

_MAX_CYCLE = 10_000


class Draw(NamedTuple):
    """What stands at some positions: numbers of samples, and which pass over its data set each
    belongs to; both int64."""

    samples: np.ndarray
    passes: np.ndarray


@final
class SampleOrder:
    """Which sample stands at which position of an epoch: a pure function of the seed.

    The positions of a run go round a cycle in which each data set has as many turns as its share;
    a data set's turns take its samples in the order of its own epochs, one pass after the other.
    Of a single data set a pass is an epoch.

    Args:
        sizes: samples of each data set; they are numbered through.
        shares: turns of each data set in a cycle; one for each by default.
        seed: of the orders of the passes.
        shuffle: without it a pass takes the samples in their own order.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        shares: Sequence[int] | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        assert all(sizes), "a split has at least one sequence"
        self.seed, self._shuffle = seed, shuffle
        self._sizes = np.array(sizes, dtype=np.int64)
        self._firsts = np.cumsum(self._sizes) - self._sizes
        self._shares = np.array(shares or [1] * len(sizes), dtype=np.int64)
        self._turns = interleaved(self._shares.tolist())
        # For each turn of a cycle how many turns its data set had before.
        self._before = np.zeros_like(self._turns)
        for number in range(len(sizes)):
            self._before[self._turns == number] = np.arange(self._shares[number])

    def __len__(self) -> int:
        """Positions of an epoch: as many as all data sets have samples."""
        return int(self._sizes.sum())

    def draw(self, epoch: int, positions: np.ndarray) -> Draw:
        """The samples at these positions of an epoch."""
        cycles, turns = np.divmod(epoch * len(self) + positions, len(self._turns))
        numbers = self._turns[turns]
        drawn = cycles * self._shares[numbers] + self._before[turns]
        passes, rows = np.divmod(drawn, self._sizes[numbers])
        samples = np.empty_like(rows)
        for number in range(len(self._sizes)):
            for pass_ in np.unique(passes[numbers == number]).tolist():
                here = (numbers == number) & (passes == pass_)
                samples[here] = self._firsts[number] + self._pass(number, pass_)[rows[here]]
        return Draw(samples, passes)

    def _pass(self, number: int, pass_: int) -> EpochOrder:
        size = int(self._sizes[number])
        return EpochOrder(size, seed=self.seed, epoch=pass_, stream=number, shuffle=self._shuffle)


def interleaved(shares: Sequence[int]) -> np.ndarray:
    """Spreads the turns of a cycle so that after any n of them a share has had its part, within 1.

    Turn j of a share s may not come before its time j/s of the cycle, and the turn that has to be
    over first is taken (earliest deadline first; Baruah et al. 1996, "Proportionate progress").

    >>> interleaved([3, 1]).tolist()
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


def turns_of(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the proportion of weights, as they are written.

    Raises:
        UserError: a weight that is not above 0, or more digits than a cycle can have turns.

    >>> turns_of([0.7, 0.3])
    [7, 3]
    """
    for weight in weights:
        if not 0 < weight < float("inf"):
            raise UserError(f"the weight {weight} of a data set must be above 0")
    parts = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(part.denominator for part in parts))
    shares = [int(part * scale) for part in parts]
    shares = [share // reduce(gcd, shares) for share in shares]
    if sum(shares) > _MAX_CYCLE:
        raise UserError(
            f"the weights {', '.join(map(str, weights))} are those of a cycle of {sum(shares):,} "
            f"turns, and {_MAX_CYCLE:,} are allowed: give them fewer digits, for instance 1 and 2.5"
        )
    return shares


@final
class Mixture:
    """The sequences of several splits, numbered through, and their shares of the samples.

    Args:
        splits: at least one.
        shares: turns of each split in a cycle; one for each by default.
    """

    def __init__(self, splits: Sequence[SplitReader], shares: Sequence[int] | None = None) -> None:
        self._splits, self._shares = tuple(splits), tuple(shares or [1] * len(splits))
        self._ends = list(accumulate(len(split) for split in splits))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, sample: int) -> np.ndarray:
        """Tokens of the residues of a sequence, uint8, a read-only view."""
        number = bisect_right(self._ends, sample)
        return self._splits[number][sample - self._first(number)]

    def identifier(self, sample: int) -> str:
        """The accession of a sequence, or whatever its record was called."""
        number = bisect_right(self._ends, sample)
        return self._splits[number].identifier(sample - self._first(number))

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Residues of these sequences, int64."""
        lengths = np.empty(len(samples), dtype=np.int64)
        numbers = np.searchsorted(self._ends, samples, side="right")
        for number, split in enumerate(self._splits):
            here = numbers == number
            lengths[here] = split.lengths_of(samples[here] - self._first(number))
        return lengths

    def order(self, *, seed: int) -> SampleOrder:
        """The order in which the samples of a run are drawn."""
        sizes = [len(split) for split in self._splits]
        return SampleOrder(sizes, shares=self._shares, seed=seed)

    @property
    def fingerprint(self) -> str:
        """What a place in the data refers to: of a single split its own."""
        parts = [split.fingerprint for split in self._splits]
        if len(parts) == 1:
            return parts[0]
        lines = [f"{share} {part}" for share, part in zip(self._shares, parts, strict=True)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _first(self, number: int) -> int:
        return self._ends[number - 1] if number else 0
