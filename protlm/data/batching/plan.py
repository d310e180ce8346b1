"""The order of a run's batches, the micro-batches of ranks, and the position to resume from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from typing import ClassVar, Protocol, TypeAlias, final

import numpy as np
from torch.utils.data import Sampler

from protlm.data.batching.mixture import Documents, SampleOrder
from protlm.system.errors import UserError

SPECIALS = 2

# Tokens of a batch; a block is of a number of samples for each.
_BLOCK_FOR = 131_072

# Returns the lengths of samples in residues, int64, given their numbers.
Lengths: TypeAlias = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class RankBatches:
    """What a rank computes of a batch: `micro_batches`, one after the other.

    A batch has n = `world_size * micro_batches` of them, and number s has the rows s, s + n, ...
    With `fill`, all of the same length have the same number of rows, also in the last batch of a
    block, so that they have the same shape. An optimizer step has `batches_per_step` batches.
    """

    rank: int = 0
    world_size: int = 1
    micro_batches: int = 1
    fill: bool = False
    batches_per_step: int = 1

    @property
    def num_micro_batches(self) -> int:
        return self.world_size * self.micro_batches

    @property
    def numbers(self) -> range:
        """Numbers of the micro-batches of this rank."""
        return range(self.rank * self.micro_batches, (self.rank + 1) * self.micro_batches)


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


Content: TypeAlias = tuple[np.ndarray, np.random.Generator | None]


class Row(Protocol):
    """The content of a row of a batch: a pure function of the seed and the data position."""

    @property
    def samples(self) -> tuple[int, ...]:
        """Numbers of the samples of the row: one, or those that are packed or joined in it."""
        ...

    def read(self, sequences: Sequences, *, seed: int) -> list[Content]:
        """Returns its tokens with special tokens, int64, and its random number generator.

        Packed proteins have their own, or None if they have no targets.
        """
        ...


@dataclass(frozen=True)
class GlobalBatch:
    """The rows of a batch over all ranks, padded to `length`; `num_tokens` are without padding.

    Packed proteins have at most `longest` tokens.
    """

    rows: Sequence[Row]
    length: int
    num_tokens: int
    after: Progress
    longest: int | None = None


@dataclass(frozen=True)
class BatchPlan:
    """The micro-batch of a global batch that a rank computes at a time.

    `rows` has None for filler rows; `length` is the length in tokens to which all rows are padded;
    `after` is the progress after the whole batch; `micro_batch` is its number in that; `step`
    is the optimizer step of the batch, counted from 0.
    """

    rows: tuple[Row | None, ...]
    length: int
    after: Progress
    micro_batch: int = 0
    step: int = 0
    longest: int | None = None


@dataclass(frozen=True)
class SampleBlock:
    """Consecutive samples, or documents, of the order, from which batches are formed together.

    Of each sample it has the number, the pass over its data set and the length, int64.
    """

    start: Progress
    seed: int
    samples: np.ndarray
    passes: np.ndarray
    num_residues: np.ndarray
    documents: Documents | None = None


@dataclass(frozen=True)
class BatchingStrategy(ABC):
    """Assigns the samples of a block to batches.

    Args:
        tokens_per_batch: maximum of rows times padded length over all ranks; a longer row forms a
            separate batch.
        max_length: maximum number of tokens of a row, including special tokens.
        block: number of samples from which batches are formed together; None uses 16,384 for
            every 131,072 tokens of a batch, rounded up.
    """

    # About 45 batches of proteins; only the last one is not full.
    usual_block: ClassVar[int] = 16_384

    tokens_per_batch: int
    max_length: int
    block: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("tokens_per_batch", 1), ("max_length", SPECIALS + 1), ("block", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name}={value} must be at least {least}")

    @property
    def block_size(self) -> int:
        return self.block or self.usual_block * -(-self.tokens_per_batch // _BLOCK_FOR)

    @abstractmethod
    def batches(self, block: SampleBlock) -> list[GlobalBatch]:
        """Returns the batches of a block in order."""

    def num_batches(self, block: SampleBlock) -> int:
        return len(self.batches(block))

    @property
    def longest_row(self) -> int:
        return self.max_length

    @abstractmethod
    def left_out(self, num_residues: np.ndarray) -> np.ndarray:
        """Returns the number of residues of each sequence that do not fit in a row."""


@final
class BatchStream(Sampler[BatchPlan]):
    """Batches in an order that depends only on the samples, their order and the rule.

    An epoch is divided into blocks, which are computed only when they are reached, so that a run
    of any length starts or resumes immediately at any position. Ranks take some of the rows of
    each batch, so the batches are the same for any number of ranks and of micro-batches.

    Args:
        start: position from which to start or resume.
        num_batches: number of batches of the whole run, over several epochs; None stops at the end
            of the epoch of `start`.
        done: number of batches of the run before `start`.
        share: the micro-batches of this rank; each is a plan.
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
        share: RankBatches = RankBatches(),
    ) -> None:
        assert 0 <= share.rank < share.world_size
        assert 0 <= start.samples <= len(order)
        self._lengths_of, self._order, self._rule = lengths_of, order, rule
        self._start, self._share = start, share
        self._num_batches, self._done = num_batches, done

    def __len__(self) -> int:
        """Returns the number of plans of the whole run or epoch, independent of `start`."""
        batches = self._batches_per_epoch if self._num_batches is None else self._num_batches
        return batches * self._share.micro_batches

    def __iter__(self) -> Iterator[BatchPlan]:
        """Yields the plans of an epoch, or those of a run, whose steps count from its beginning."""
        if self._num_batches is None:
            yield from self._epoch(self._start)
            return
        left = self._num_batches - self._done
        for number, plan in enumerate(islice(self._epochs(), left * self._share.micro_batches)):
            batch = self._done + number // self._share.micro_batches
            yield replace(plan, step=batch // self._share.batches_per_step)

    @cached_property
    def _batches_per_epoch(self) -> int:
        starts = range(0, len(self._order), self._rule.block_size)
        return sum(
            self._rule.num_batches(self.samples(self._start.epoch, start)) for start in starts
        )

    def _epochs(self) -> Iterator[BatchPlan]:
        yield from self._epoch(self._start)
        for epoch in count(self._start.epoch + 1):
            yield from self._epoch(Progress(epoch))

    def _epoch(self, start: Progress) -> Iterator[BatchPlan]:
        block = self._rule.block_size
        for first in range(start.samples // block * block, len(self._order), block):
            before = Progress(start.epoch, first)
            for batch in self.block(start.epoch, first):
                if before >= start:
                    yield from self._plans(batch)
                elif batch.after > start:
                    raise UserError(
                        "the data position to resume from is inside a batch: the run was begun by "
                        "another version of protlm; continue it with that version, or begin another"
                    )
                before = batch.after

    def block(self, epoch: int, first: int) -> list[GlobalBatch]:
        """Returns the batches of the block that begins at position `first` of an epoch."""
        return self._rule.batches(self.samples(epoch, first))

    def samples(self, epoch: int, first: int) -> SampleBlock:
        """Returns the block that begins at position `first` of an epoch."""
        last = min(first + self._rule.block_size, len(self._order))
        drawn = self._order.draw(epoch, np.arange(first, last))
        return SampleBlock(
            start=Progress(epoch, first),
            seed=self._order.seed,
            samples=drawn.samples,
            passes=drawn.passes,
            num_residues=self._lengths_of(drawn.samples),
            documents=drawn.documents,
        )

    def _plans(self, batch: GlobalBatch) -> Iterator[BatchPlan]:
        num_micro_batches, num_rows = self._share.num_micro_batches, len(batch.rows)
        if self._share.fill:
            num_rows = max(num_rows, self._rule.tokens_per_batch // batch.length)
        most = -(-num_rows // num_micro_batches)
        is_last = batch.after == Progress(batch.after.epoch, len(self._order))
        after = Progress(batch.after.epoch + 1) if is_last else batch.after
        for number in self._share.numbers:
            rows: list[Row | None] = list(batch.rows[number::num_micro_batches])
            rows += [None] * (most - len(rows))
            yield BatchPlan(
                tuple(rows),
                batch.length,
                after,
                number,
                longest=batch.longest,
            )


def forecast(lengths_of: Lengths, order: SampleOrder, rule: BatchingStrategy) -> str:
    """Says what the first block of an epoch, which the first batch needs anyway, says of all.

    It is what is cropped, or the documents, and the fraction of the positions that are padding.
    """
    block = BatchStream(lengths_of, order, rule).samples(0, 0)
    left_out, batches = rule.left_out(block.num_residues), rule.batches(block)
    size = sum(len(batch.rows) * batch.length for batch in batches)
    useful = sum(batch.num_tokens for batch in batches) / size
    padding = f"{1 - useful:.1%} of the positions of a batch are padding"
    if block.documents is not None:
        return f"{block.documents.describe()}; {padding}"
    if not left_out.any():
        return padding
    return (
        f"{np.count_nonzero(left_out):,} of the first {len(left_out):,} sequences are cropped, by "
        f"{left_out.sum():,} residues; {padding}"
    )
