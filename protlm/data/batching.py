"""The order in which a run's batches come, and the place in the data to resume from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Protocol, TypeAlias, final

import numpy as np
from torch.utils.data import Sampler

from protlm.data.curriculum import Curriculum
from protlm.data.mixture import SampleOrder
from protlm.errors import UserError

SPECIALS = 2

# Some 45 batches of proteins, of which the last is the one that is not full.
_WINDOW, _WINDOW_FOR = 16_384, 131_072

# Residues of the samples with these numbers, int64.
Lengths: TypeAlias = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, order=True)
class Progress:
    """The state to resume from: an epoch, and how many of its samples are consumed.

    `tokens` are those of the next sample that are consumed too, where samples are concatenated.
    """

    epoch: int = 0
    samples: int = 0
    tokens: int = 0


class Sequences(Protocol):
    """Whatever gives the residues of a sample, as tokens of uint8."""

    def __getitem__(self, sample: int, /) -> np.ndarray: ...


class Row(Protocol):
    """What stands in a row of a batch, a pure function of the seed and the place in the data."""

    @property
    def sample(self) -> int:
        """The number of the row's first, mostly only sample."""
        ...

    def read(self, sequences: Sequences, *, seed: int) -> tuple[np.ndarray, np.random.Generator]:
        """Its tokens, special ones included, int64, and the random numbers that are its own."""
        ...


@dataclass(frozen=True)
class GlobalBatch:
    """A step's rows for all ranks together.

    Attributes:
        rows: of all ranks.
        length: in tokens, what they are padded to.
        num_tokens: of all rows, padding not counted.
        after: the progress once the batch is consumed.
    """

    rows: Sequence[Row]
    length: int
    num_tokens: int
    after: Progress


@dataclass(frozen=True)
class BatchPlan:
    """What a rank computes at a time: a slice of a global batch.

    `rows` are the slice's, None for a row that only fills up; `length` is the length in tokens
    that all rows are padded to; `after` is the progress once the whole batch is consumed; `slice`
    is the slice's number.
    """

    rows: tuple[Row | None, ...]
    length: int
    after: Progress
    slice: int = 0


@dataclass(frozen=True)
class Window:
    """Samples that follow one another in the order, from which batches are made together.

    Attributes:
        start: the place of the first.
        seed: of whatever is drawn.
        samples: their numbers, int64.
        passes: which pass over its data set each belongs to, int64.
        num_residues: of each, int64.
        max_length: tokens of a row at most, special ones included.
    """

    start: Progress
    seed: int
    samples: np.ndarray
    passes: np.ndarray
    num_residues: np.ndarray
    max_length: int

    @property
    def end(self) -> Progress:
        """The place after the last."""
        return Progress(self.start.epoch, self.start.samples + len(self.samples))


@dataclass(frozen=True)
class BatchRule(ABC):
    """How the samples of a window become batches.

    Args:
        tokens_per_batch: rows times padded length is at most this, over all ranks together; a
            row that is longer is a batch of its own.
        max_length: tokens of a row at most, special ones included.
        window: how many samples of the order are looked at together; None takes 16,384 for every
            131,072 tokens of a batch, begun ones too.
        curriculum: shorter rows at first.

    Raises:
        UserError: a setting that cannot be.
    """

    tokens_per_batch: int
    max_length: int
    window: int | None = None
    curriculum: Curriculum = field(default_factory=Curriculum)

    def __post_init__(self) -> None:
        for name, least in (("tokens_per_batch", 1), ("max_length", SPECIALS + 1), ("window", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name}={value} must be at least {least}")
        self.curriculum.check(self.max_length)

    @property
    def window_size(self) -> int:
        """How many samples of the order are looked at together."""
        if self.window is not None:
            return self.window
        return _WINDOW * -(-self.tokens_per_batch // _WINDOW_FOR)

    @abstractmethod
    def batches(self, window: Window) -> list[GlobalBatch]:
        """The batches of a window in the order in which they come."""

    def num_batches(self, window: Window) -> int:
        """How many batches a window has."""
        return len(self.batches(window))

    def row_length(self, seen: int) -> int:
        """Tokens of a row at most, after so many samples of the run."""
        return self.curriculum.max_length(seen) or self.max_length

    @abstractmethod
    def left_out(self, num_residues: np.ndarray, row_length: int) -> np.ndarray:
        """Of sequences with so many residues, how many no row of so many tokens holds."""


@dataclass(frozen=True)
class Share:
    """Which slices of a batch a process takes: `parts` of them, one after the other.

    A batch has `world_size * parts` slices, and slice s every so-many-th row from row s on. With
    `fill` slices of one length have one number of rows, whatever is left for the last batch of a
    window, so that they have one shape.
    """

    rank: int = 0
    world_size: int = 1
    parts: int = 1
    fill: bool = False

    @property
    def num_slices(self) -> int:
        """Slices of a batch."""
        return self.world_size * self.parts

    @property
    def slices(self) -> range:
        """The numbers of this process's."""
        return range(self.rank * self.parts, (self.rank + 1) * self.parts)


@final
class BatchStream(Sampler[BatchPlan]):
    """Batches in an order that depends on the samples, their order and the rule alone.

    An epoch is cut into windows, and nothing is known of a window before its turn: a run of any
    length starts, or is resumed, at any place at once. Ranks take slices of the rows of each batch,
    so the batches are the same for any number of ranks, and of parts that one computes at a time.

    Args:
        lengths_of: residues of samples.
        order: in which samples come.
        rule: how samples become batches.
        start: where to go on.
        num_batches: batches of the whole run, which goes on over epochs; None is the one epoch
            of `start`.
        done: batches of the run that were consumed before `start`.
        share: which slices are this process's; each is a plan.
    """

    def __init__(
        self,
        lengths_of: Lengths,
        order: SampleOrder,
        rule: BatchRule,
        *,
        start: Progress = Progress(),
        num_batches: int | None = None,
        done: int = 0,
        share: Share = Share(),
    ) -> None:
        assert 0 <= share.rank < share.world_size
        assert 0 <= start.samples <= len(order)
        self._lengths_of, self._order, self._rule = lengths_of, order, rule
        self._start, self._share = start, share
        self._num_batches, self._done = num_batches, done

    def __len__(self) -> int:
        """Plans of the whole run or epoch, wherever iteration starts."""
        batches = self._batches_per_epoch if self._num_batches is None else self._num_batches
        return batches * self._share.parts

    def __iter__(self) -> Iterator[BatchPlan]:
        if self._num_batches is None:
            return self._epoch(self._start)
        left = self._num_batches - self._done
        return islice(self._epochs(), left * self._share.parts)

    @cached_property
    def _batches_per_epoch(self) -> int:
        starts = range(0, len(self._order), self._rule.window_size)
        windows = (self._window(self._start.epoch, start) for start in starts)
        return sum(self._rule.num_batches(window) for window in windows)

    def _epochs(self) -> Iterator[BatchPlan]:
        progress = self._start
        while True:
            yield from self._epoch(progress)
            progress = Progress(progress.epoch + 1)

    def _epoch(self, start: Progress) -> Iterator[BatchPlan]:
        """What is left of an epoch."""
        window = self._rule.window_size
        for first in range(start.samples // window * window, len(self._order), window):
            before = Progress(start.epoch, first)
            for batch in self.window(start.epoch, first):
                if before >= start:
                    yield from self._plans(batch)
                elif batch.after > start:
                    raise UserError(
                        "the place in the data to go on from lies inside a batch: the run was "
                        "begun by another version of protlm; continue it with that one, or choose "
                        "another run_dir="
                    )
                before = batch.after

    def window(self, epoch: int, first: int) -> list[GlobalBatch]:
        """The batches of the window that begins at position `first` of an epoch."""
        return self._rule.batches(self._window(epoch, first))

    def _window(self, epoch: int, first: int) -> Window:
        last = min(first + self._rule.window_size, len(self._order))
        samples, passes = self._order.draw(epoch, np.arange(first, last))
        seen = epoch * len(self._order) + first
        return Window(
            start=Progress(epoch, first),
            seed=self._order.seed,
            samples=samples,
            passes=passes,
            num_residues=self._lengths_of(samples),
            max_length=self._rule.row_length(seen),
        )

    def _plans(self, batch: GlobalBatch) -> Iterator[BatchPlan]:
        num_slices, num_rows = self._share.num_slices, len(batch.rows)
        if self._share.fill:
            num_rows = max(num_rows, self._rule.tokens_per_batch // batch.length)
        most = -(-num_rows // num_slices)
        is_last = batch.after == Progress(batch.after.epoch, len(self._order))
        after = Progress(batch.after.epoch + 1) if is_last else batch.after
        for number in self._share.slices:
            rows: list[Row | None] = list(batch.rows[number::num_slices])
            rows += [None] * (most - len(rows))
            yield BatchPlan(tuple(rows), batch.length, after, number)
