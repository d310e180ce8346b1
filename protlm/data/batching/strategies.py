"""Batches of rows: one sequence per row, in buckets of length, or sequences that are joined."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import numpy as np

from protlm.bounds import most_proteins
from protlm.data.batching.plan import (
    SPECIALS,
    BatchingStrategy,
    Content,
    GlobalBatch,
    Progress,
    SampleBlock,
    Sequences,
)
from protlm.data.masking import crop, row_rng
from protlm.data.vocabulary import VOCABULARY

_FIRST_EDGE = 64
_EDGES_PER_DOUBLING = 16


@final
@dataclass(frozen=True)
class SequenceRow:
    """`<cls>`, residues of one sequence, `<eos>`: at most `max_length` tokens.

    A cropped sequence has `<eos>` only if the crop includes the end of the sequence. Crop and masks
    differ between repeats of a sample.
    """

    sample: int
    repeat: int
    max_length: int
    crop: str

    @property
    def samples(self) -> tuple[int, ...]:
        return (self.sample,)

    def read(self, sequences: Sequences, *, seed: int) -> list[Content]:
        rng = row_rng(seed, self.repeat, self.sample)
        residues = sequences[self.sample]
        part = crop(len(residues), self.max_length - SPECIALS, self.crop, rng)
        end = [VOCABULARY.eos] if part.stop == len(residues) else []
        parts = ([VOCABULARY.cls], residues[part], end)
        # An empty list would convert them to floating-point numbers.
        return [(np.concatenate(parts, dtype=np.int64, casting="unsafe"), rng)]


@dataclass(frozen=True)
class LengthBuckets(BatchingStrategy):
    """Sorts the samples of a block by length, cuts them into batches, and shuffles the batches.

    No sample is dropped or repeated. `crop` is the part that is kept of samples that are longer
    than `max_length`; there are sixteen padded lengths per doubling, or as many as `even`, evenly
    spaced.
    """

    crop: str = "prefix"
    even: int = 0

    @cached_property
    def edges(self) -> np.ndarray:
        if self.even:
            return np.arange(1, self.even + 1) * self.max_length // self.even
        edges = [min(_FIRST_EDGE, self.max_length)]
        while edges[-1] < self.max_length:
            doubling = 1 << (edges[-1].bit_length() - 1)
            edges.append(min(edges[-1] + doubling // _EDGES_PER_DOUBLING, self.max_length))
        return np.array(edges, dtype=np.int64)

    def batches(self, block: SampleBlock) -> list[GlobalBatch]:
        cuts, num_tokens = self._cuts(block), self._num_tokens(block)
        epoch, consumed = block.start.epoch, block.start.samples
        # Batches are shuffled in any case, so that the first batches sample all lengths.
        rng = np.random.default_rng([block.seed % 2**64, epoch, consumed])
        batches = []
        for number in rng.permutation(len(cuts)):
            places, length = cuts[number]
            all_places = np.hstack(places)
            consumed += len(all_places)
            rows, useful = self._rows(block, places), int(num_tokens[all_places].sum())
            batches.append(GlobalBatch(rows, length, useful, Progress(epoch, consumed)))
        return batches

    def num_batches(self, block: SampleBlock) -> int:
        """Creates no rows, since a validation split may have millions."""
        return len(self._cuts(block))

    def left_out(self, num_residues: np.ndarray) -> np.ndarray:
        return np.maximum(num_residues + SPECIALS - self.max_length, 0)

    def _cuts(self, block: SampleBlock) -> list[tuple[Any, int]]:
        """Returns the positions in the block of the rows of each batch, and their padded length."""
        # In descending order, only the last batch of a block can be far below the budget.
        longest_first = np.argsort(-block.num_residues, kind="stable")
        padded = self.edges[np.searchsorted(self.edges, self._num_tokens(block))]
        cuts: list[tuple[Any, int]] = []
        position = 0
        while position < len(longest_first):
            length = int(padded[longest_first[position]])
            num_rows = max(self.tokens_per_batch // length, 1)
            cuts.append((longest_first[position : position + num_rows], length))
            position += num_rows
        return cuts

    def _num_tokens(self, block: SampleBlock) -> np.ndarray:
        return np.minimum(block.num_residues + SPECIALS, self.max_length)

    def _rows(self, block: SampleBlock, places: Any) -> list[Any]:
        return self._proteins(block, places)

    def _proteins(self, block: SampleBlock, places: Any) -> list[SequenceRow]:
        drawn = zip(block.samples[places].tolist(), block.passes[places].tolist(), strict=True)
        return [SequenceRow(sample, repeat, self.max_length, self.crop) for sample, repeat in drawn]


@dataclass(frozen=True)
class ProteinsRow:
    """Whole proteins, end to end."""

    proteins: tuple[SequenceRow, ...]

    @property
    def samples(self) -> tuple[int, ...]:
        return tuple(protein.sample for protein in self.proteins)

    def read(self, sequences: Sequences, *, seed: int) -> list[Content]:
        return [one for row in self.proteins for one in row.read(sequences, seed=seed)]


@dataclass(frozen=True)
class WholeProteins(LengthBuckets):
    """Fills rows with the samples of a block, end to end, and shuffles the batches.

    Samples are taken in order while the longest one fits, and then the longest that fits. A row has
    `row` tokens, or those of a batch if there are fewer, and room for the longest sample.
    """

    row: int = 16_384

    @property
    def longest_row(self) -> int:
        return max(min(self.row, self.tokens_per_batch), self.max_length)

    def batches(self, block: SampleBlock) -> list[GlobalBatch]:
        return [replace(batch, longest=self.max_length) for batch in super().batches(block)]

    def _cuts(self, block: SampleBlock) -> list[tuple[Any, int]]:
        return self._batched(filled(self._num_tokens(block).tolist(), self.longest_row))

    def _batched(self, rows: list[list[int]]) -> list[tuple[Any, int]]:
        """Returns the rows of each batch, and their padded length."""
        firsts = range(0, len(rows), max(self.tokens_per_batch // self.longest_row, 1))
        return [(rows[first : first + firsts.step], self.longest_row) for first in firsts]

    def _rows(self, block: SampleBlock, places: Any) -> list[Any]:
        return [ProteinsRow(tuple(self._proteins(block, np.array(row)))) for row in places]


def filled(num_tokens: list[int], size: int) -> list[list[int]]:
    """Returns the numbers of the proteins of each row."""
    waiting: dict[int, list[int]] = {}
    for number in reversed(range(len(num_tokens))):
        waiting.setdefault(num_tokens[number], []).append(number)
    lengths, rows, is_used = sorted(waiting), list[list[int]](), [False] * len(num_tokens)
    first = 0
    while lengths:
        row, room = [], size
        while lengths and lengths[0] <= room and len(row) < most_proteins(size):
            while is_used[first]:
                first += 1
            longest = lengths[bisect_right(lengths, room) - 1]
            length = num_tokens[first] if lengths[-1] <= room else longest
            # The first of its length is also the first of all, if this is the length of that.
            row.append(waiting[length].pop())
            is_used[row[-1]] = True
            room -= length
            if not waiting[length]:
                lengths.remove(length)
        rows.append(row)
    return rows


@final
@dataclass(frozen=True)
class ConcatenatedRow:
    """`<cls>`, then a chunk of the stream of sequences, each of which ends with `<eos>`.

    Attributes:
        position: position of its first sample in the order of the epoch.
        samples: sequences that overlap with the chunk, in order.
        skip: number of tokens of the first sequence before the chunk.
        num_tokens: number of tokens of the chunk, without `<cls>`.
    """

    epoch: int
    position: int
    samples: tuple[int, ...]
    skip: int
    num_tokens: int

    def read(self, sequences: Sequences, *, seed: int) -> list[Content]:
        eos = [VOCABULARY.eos]
        parts = [part for sample in self.samples for part in (sequences[sample], eos)]
        chunk = np.concatenate(parts)[self.skip : self.skip + self.num_tokens]
        rng = row_rng(seed, self.epoch, self.position, self.skip)
        return [(np.concatenate(([VOCABULARY.cls], chunk)), rng)]


@final
@dataclass(frozen=True)
class Concatenation(BatchingStrategy):
    """Joins the samples of a block by `<eos>`, and cuts them into rows (arXiv 2009.14794).

    Each row begins with `<cls>`, which precedes every sequence at inference. Positions count
    through the row, and attention crosses the borders of sequences, as in the paper. No token is
    dropped or repeated; only the last row of a block may be shorter.
    """

    def batches(self, block: SampleBlock) -> list[GlobalBatch]:
        # One token of each row is <cls>.
        per_row = self.max_length - 1
        ends = np.cumsum(block.num_residues + 1)
        rows = [
            self._row(block, ends, start, per_row) for start in range(0, int(ends[-1]), per_row)
        ]
        num_rows = max(self.tokens_per_batch // self.max_length, 1)
        batches = []
        for first in range(0, len(rows), num_rows):
            members = rows[first : first + num_rows]
            num_tokens = sum(row.num_tokens + 1 for row in members)
            after = self._place(block, ends, (first + num_rows) * per_row)
            batches.append(GlobalBatch(members, self.max_length, num_tokens, after))
        return batches

    def left_out(self, num_residues: np.ndarray) -> np.ndarray:
        return np.zeros_like(num_residues)

    def _row(self, block: SampleBlock, ends: np.ndarray, start: int, size: int) -> ConcatenatedRow:
        stop = min(start + size, int(ends[-1]))
        place = self._place(block, ends, start)
        first = place.samples - block.start.samples
        last = int(np.searchsorted(ends, stop))
        samples = tuple(block.samples[first : last + 1].tolist())
        return ConcatenatedRow(place.epoch, place.samples, samples, place.tokens, stop - start)

    def _place(self, block: SampleBlock, ends: np.ndarray, token: int) -> Progress:
        """Returns the position of a token of the block's stream, or the end of the block."""
        number = int(np.searchsorted(ends, token, side="right"))
        if number == len(ends):
            return Progress(block.start.epoch, block.start.samples + len(block.samples))
        begin = int(ends[number - 1]) if number else 0
        return Progress(block.start.epoch, block.start.samples + number, token - begin)
