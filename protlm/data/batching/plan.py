"""The order of a run's batches, and the data position to resume from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Protocol, TypeAlias, final

import numpy as np
from torch.utils.data import Sampler

from protlm.data.batching.curriculum import Curriculum
from protlm.data.batching.mixture import SampleOrder
from protlm.data.batching.rank_slice import RankSlice
from protlm.system.errors import UserError

SPECIALS = 2

# About 45 batches of proteins; only the last one is not full.
_WINDOW, _WINDOW_FOR = 16_384, 131_072
_WHOLE = RankSlice()

# Returns the lengths of samples in residues, int64, given their numbers.
Lengths: TypeAlias = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, order=True)
class Progress:
    """The state to resume from: an epoch, and the number of its samples that are consumed.

    `tokens` is the number of consumed tokens of the next sample, if samples are concatenated.
    """

    epoch: int = 0
    samples: int = 0
    tokens: int = 0


class Sequences(Protocol):
    """Sequences of residue tokens, uint8, by sample number."""

    def __getitem__(self, sample: int, /) -> np.ndarray: ...


class Row(Protocol):
    """The content of a row of a batch: a pure function of the seed and the data position."""

    @property
    def samples(self) -> tuple[int, ...]:
        """Numbers of the samples of the row: one, or those that overlap with a joined row."""
        ...

    def read(self, sequences: Sequences, *, seed: int) -> tuple[np.ndarray, np.random.Generator]:
        """Returns its tokens with special tokens, int64, and its random number generator."""
        ...


@dataclass(frozen=True)
class GlobalBatch:
    """The rows of a batch over all ranks.

    Attributes:
        rows: rows of all ranks.
        length: length in tokens to which they are padded.
        num_tokens: number of tokens of all rows, without padding.
        after: progress after the batch.
    """

    rows: Sequence[Row]
    length: int
    num_tokens: int
    after: Progress


@dataclass(frozen=True)
class BatchPlan:
    """The slice of a global batch that a rank computes at a time.

    `rows` has None for filler rows; `length` is the length in tokens to which all rows are padded;
    `after` is the progress after the whole batch; `slice` is the number of the slice; `step` is the
    optimizer step of the batch, counted from 0.
    """

    rows: tuple[Row | None, ...]
    length: int
    after: Progress
    slice: int = 0
    step: int = 0


@dataclass(frozen=True)
class SampleWindow:
    """Consecutive samples of the order, from which batches are formed together.

    Attributes:
        start: position of the first sample.
        seed: seed of all random numbers.
        samples: numbers of the samples, int64.
        passes: pass over its data set of each sample, int64.
        num_residues: length of each sample, int64.
        max_length: maximum number of tokens of a row, including special tokens.
    """

    start: Progress
    seed: int
    samples: np.ndarray
    passes: np.ndarray
    num_residues: np.ndarray
    max_length: int

    @property
    def end(self) -> Progress:
        """Position after the last sample."""
        return Progress(self.start.epoch, self.start.samples + len(self.samples))


@dataclass(frozen=True)
class BatchingStrategy(ABC):
    """Assigns the samples of a window to batches.

    Args:
        tokens_per_batch: maximum of rows times padded length over all ranks; a longer row forms a
            separate batch.
        max_length: maximum number of tokens of a row, including special tokens.
        window: number of samples from which batches are formed together; None uses 16,384 for
            every 131,072 tokens of a batch, rounded up.
        curriculum: the length curriculum.
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
        """Number of samples from which batches are formed together."""
        if self.window is not None:
            return self.window
        return _WINDOW * -(-self.tokens_per_batch // _WINDOW_FOR)

    @abstractmethod
    def batches(self, window: SampleWindow) -> list[GlobalBatch]:
        """Returns the batches of a window in order."""

    def num_batches(self, window: SampleWindow) -> int:
        """Returns the number of batches of a window."""
        return len(self.batches(window))

    def row_length(self, seen: int) -> int:
        """Returns the maximum length of a row after a number of samples of the run."""
        return self.curriculum.max_length(seen) or self.max_length

    @abstractmethod
    def left_out(self, num_residues: np.ndarray, row_length: int) -> np.ndarray:
        """Returns the number of residues of each sequence that do not fit in a row."""


@final
class BatchStream(Sampler[BatchPlan]):
    """Batches in an order that depends only on the samples, their order and the rule.

    An epoch is divided into windows, which are computed only when they are reached, so that a run
    of any length starts or resumes immediately at any position. Ranks take slices of the rows of
    each batch, so the batches are the same for any number of ranks and of parts.

    Args:
        lengths_of: lengths of samples in residues.
        order: order of the samples.
        rule: assigns samples to batches.
        start: position from which to start or resume.
        num_batches: number of batches of the whole run, over several epochs; None stops at the end
            of the epoch of `start`.
        done: number of batches of the run before `start`.
        share: the slices of this rank; each is a plan.
    """

    def __init__(
        self,
        lengths_of: Lengths,
        order: SampleOrder,
        rule: BatchingStrategy,
        *,
        start: Progress = Progress(),
        num_batches: int | None = None,
        done: int = 0,
        share: RankSlice = _WHOLE,
    ) -> None:
        assert 0 <= share.rank < share.world_size
        assert 0 <= start.samples <= len(order)
        self._lengths_of, self._order, self._rule = lengths_of, order, rule
        self._start, self._share = start, share
        self._num_batches, self._done = num_batches, done

    def __len__(self) -> int:
        """Returns the number of plans of the whole run or epoch, independent of `start`."""
        batches = self._batches_per_epoch if self._num_batches is None else self._num_batches
        return batches * self._share.parts

    def __iter__(self) -> Iterator[BatchPlan]:
        if self._num_batches is None:
            return self._epoch(self._start)
        left = self._num_batches - self._done
        return self._with_steps(islice(self._epochs(), left * self._share.parts))

    def _with_steps(self, plans: Iterator[BatchPlan]) -> Iterator[BatchPlan]:
        """Sets the optimizer steps, counted from the beginning of the run."""
        for number, plan in enumerate(plans):
            batch = self._done + number // self._share.parts
            yield replace(plan, step=batch // self._share.batches_per_step)

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
        """Yields the plans of the rest of an epoch."""
        window = self._rule.window_size
        for first in range(start.samples // window * window, len(self._order), window):
            before = Progress(start.epoch, first)
            for batch in self.window(start.epoch, first):
                if before >= start:
                    yield from self._plans(batch)
                elif batch.after > start:
                    raise UserError(
                        "the data position to resume from is inside a batch: the run was begun by "
                        "another version of protlm; continue it with that version, or choose "
                        "another run_dir="
                    )
                before = batch.after

    def window(self, epoch: int, first: int) -> list[GlobalBatch]:
        """Returns the batches of the window that begins at position `first` of an epoch."""
        return self._rule.batches(self._window(epoch, first))

    def _window(self, epoch: int, first: int) -> SampleWindow:
        last = min(first + self._rule.window_size, len(self._order))
        samples, passes = self._order.draw(epoch, np.arange(first, last))
        seen = epoch * len(self._order) + first
        return SampleWindow(
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
