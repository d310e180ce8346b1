"""Batches of similar length within a budget of tokens, and the place in the data to resume from."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import final

import numpy as np
from torch.utils.data import Sampler

from protlm.data.order import EpochOrder
from protlm.errors import UserError

FILLER = -1
SPECIALS = 2
_FIRST_EDGE = 64
_EDGES_PER_DOUBLING = 8


@dataclass(frozen=True)
class Progress:
    """The state to resume from: an epoch and how many of its samples are consumed."""

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class BatchPlan:
    """What a rank computes in a step.

    `samples` are this rank's rows, -1 for a row that only fills up; `length` is the length in
    tokens that all rows are padded to; `after` is the progress once the batch is consumed.
    """

    epoch: int
    samples: np.ndarray
    length: int
    after: Progress


@dataclass(frozen=True)
class BatchRule:
    """How samples become batches.

    Args:
        tokens_per_batch: rows times padded length is at most this, over all ranks together; a
            row that is longer is a batch of its own.
        max_length: what longer samples are cropped to, in tokens with `<cls>` and `<eos>`.
        bucket_edges: the padded lengths; None takes eight to each doubling.
        window: how many samples of the order are sorted by length together.
        seed: of the order.
        shuffle: without it samples come in their own order, but for the sorting.

    Raises:
        UserError: a setting that cannot be.
    """

    tokens_per_batch: int
    max_length: int
    bucket_edges: tuple[int, ...] | None = None
    window: int = 16_384
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name, least in (("tokens_per_batch", 1), ("max_length", SPECIALS + 1), ("window", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name}={getattr(self, name)} must be at least {least}")
        edges = self.edges
        if np.any(np.diff(edges) <= 0) or edges[-1] < self.max_length:
            raise UserError(
                f"bucket_edges={self.bucket_edges} must ascend and reach "
                f"max_length={self.max_length}"
            )

    @cached_property
    def edges(self) -> np.ndarray:
        """The padded lengths, ascending."""
        if self.bucket_edges is not None:
            return np.array(self.bucket_edges or [0], dtype=np.int64)
        edges = [min(_FIRST_EDGE, self.max_length)]
        while edges[-1] < self.max_length:
            doubling = 1 << (edges[-1].bit_length() - 1)
            edges.append(min(edges[-1] + doubling // _EDGES_PER_DOUBLING, self.max_length))
        return np.array(edges, dtype=np.int64)

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """The padded length, in tokens, of samples of so many residues."""
        num_tokens = np.minimum(lengths + SPECIALS, self.max_length)
        return self.edges[np.searchsorted(self.edges, num_tokens)]


@dataclass(frozen=True)
class _GlobalBatch:
    samples: np.ndarray
    length: int


@final
class BatchStream(Sampler[BatchPlan]):
    """Batches in an order that depends on the lengths and the rule alone.

    An epoch's order is cut into windows, the samples of a window are sorted by length and cut
    into batches, and these are shuffled. A rank takes every `world_size`-th row of each batch,
    so the batches are the same for any number of ranks. No sample is dropped or repeated.

    Args:
        lengths: residues of each sample.
        rule: how samples become batches.
        start: where to go on.
        num_batches: batches of the whole run, which goes on over epochs; None is the one epoch
            of `start`.
        done: batches of the run that were consumed before `start`.
        rank: which of the processes this is.
        world_size: how many processes share a batch.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        rule: BatchRule,
        *,
        start: Progress = Progress(),
        num_batches: int | None = None,
        done: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        assert len(lengths), "a split has at least one sequence"
        assert 0 <= rank < world_size
        assert 0 <= start.samples <= len(lengths)
        self._lengths, self._rule, self._start = lengths, rule, start
        self._rank, self._world_size = rank, world_size
        self._num_batches, self._done = num_batches, done

    def __len__(self) -> int:
        """Batches of the whole run or epoch, wherever iteration starts."""
        return self._batches_per_epoch if self._num_batches is None else self._num_batches

    def __iter__(self) -> Iterator[BatchPlan]:
        if self._num_batches is None:
            return self._epoch(self._start)
        return islice(self._epochs(), self._num_batches - self._done)

    @cached_property
    def _batches_per_epoch(self) -> int:
        order = self._order(self._start.epoch)
        starts = range(0, len(self._lengths), self._rule.window)
        return sum(len(self._window(order, self._start.epoch, start)) for start in starts)

    def _order(self, epoch: int) -> EpochOrder:
        rule = self._rule
        return EpochOrder(len(self._lengths), seed=rule.seed, epoch=epoch, shuffle=rule.shuffle)

    def _epochs(self) -> Iterator[BatchPlan]:
        progress = self._start
        while True:
            yield from self._epoch(progress)
            progress = Progress(progress.epoch + 1)

    def _epoch(self, start: Progress) -> Iterator[BatchPlan]:
        """What is left of an epoch."""
        order, window = self._order(start.epoch), self._rule.window
        first = start.samples // window * window
        for window_start in range(first, len(self._lengths), window):
            consumed = window_start
            for batch in self._window(order, start.epoch, window_start):
                is_new = consumed >= start.samples
                consumed += len(batch.samples)
                if is_new:
                    yield self._plan(batch, Progress(start.epoch, consumed))
                else:
                    assert consumed <= start.samples, "progress is not between two batches"

    def _window(self, order: EpochOrder, epoch: int, start: int) -> list[_GlobalBatch]:
        """The batches of the samples at `start` and after in the order of the epoch."""
        stop = min(start + self._rule.window, len(order))
        samples = order[np.arange(start, stop)]
        padded = self._rule.padded(self._lengths[samples])
        # From long to short: only a window's last batch is ever far below the budget.
        longest_first = np.argsort(-self._lengths[samples], kind="stable")
        batches, position = [], 0
        while position < len(samples):
            length = int(padded[longest_first[position]])
            num_rows = max(self._rule.tokens_per_batch // length, 1)
            rows = longest_first[position : position + num_rows]
            batches.append(_GlobalBatch(samples[rows], length))
            position += len(rows)
        # Also where samples are not shuffled: the first batches are then a sample of all lengths.
        rng = np.random.default_rng([self._rule.seed % 2**64, epoch, start])
        return [batches[number] for number in rng.permutation(len(batches))]

    def _plan(self, batch: _GlobalBatch, after: Progress) -> BatchPlan:
        is_last = after.samples == len(self._lengths)
        next_start = Progress(after.epoch + 1) if is_last else after
        rows = np.full(-(-len(batch.samples) // self._world_size), FILLER, dtype=np.int64)
        own = batch.samples[self._rank :: self._world_size]
        rows[: len(own)] = own
        return BatchPlan(after.epoch, rows, batch.length, next_start)


def useful_share(lengths: np.ndarray, rule: BatchRule) -> float:
    """The share of an epoch's tokens that are no padding."""
    stream = BatchStream(lengths, rule)
    num_tokens = int(np.minimum(lengths + SPECIALS, rule.max_length).sum())
    return num_tokens / sum(len(plan.samples) * plan.length for plan in stream)
