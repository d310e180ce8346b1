"""Rows cut from sequences that are joined by `<eos>` (arXiv 2009.14794: 8,192 tokens each).

A row consists of `<cls>` and the next tokens of the stream, so that the model learns `<cls>`, which
precedes every sequence at inference. Positions count through the row, and attention crosses the
borders of sequences, as in the paper.
"""

from dataclasses import dataclass
from typing import final

import numpy as np

from protlm.data.batching.plan import (
    BatchingStrategy,
    GlobalBatch,
    Progress,
    SampleWindow,
    Sequences,
)
from protlm.data.masking import row_rng
from protlm.data.vocabulary import VOCABULARY


@final
@dataclass(frozen=True)
class PackedRow:
    """`<cls>`, then a segment of the stream of sequences, each of which ends with `<eos>`.

    Attributes:
        position: position of its first sample in the order of the epoch.
        samples: sequences that overlap with the segment, in order.
        skip: number of tokens of the first sequence before the segment.
        num_tokens: number of tokens of the segment, without `<cls>`.
    """

    epoch: int
    position: int
    samples: tuple[int, ...]
    skip: int
    num_tokens: int

    def read(self, sequences: Sequences, *, seed: int) -> tuple[np.ndarray, np.random.Generator]:
        parts: list[np.ndarray | list[int]] = []
        for sample in self.samples:
            parts += [sequences[sample], [VOCABULARY.eos]]
        segment = np.concatenate(parts)[self.skip : self.skip + self.num_tokens]
        rng = row_rng(seed, self.epoch, self.position, self.skip)
        return np.concatenate(([VOCABULARY.cls], segment)), rng


@final
@dataclass(frozen=True)
class Packing(BatchingStrategy):
    """Concatenates the samples of a window in order, and cuts them into rows of `max_length`.

    No token is dropped or repeated; only the last row of a window may be shorter.
    """

    def batches(self, window: SampleWindow) -> list[GlobalBatch]:
        # One token of each row is <cls>.
        per_row = window.max_length - 1
        ends = np.cumsum(window.num_residues + 1)
        starts = np.arange(0, ends[-1], per_row)
        rows = [self._row(window, ends, int(start), per_row) for start in starts]
        num_rows = max(self.tokens_per_batch // window.max_length, 1)
        batches = []
        for first in range(0, len(rows), num_rows):
            some = rows[first : first + num_rows]
            num_tokens = sum(row.num_tokens + 1 for row in some)
            after = self._place(window, ends, (first + num_rows) * per_row)
            batches.append(GlobalBatch(some, window.max_length, num_tokens, after))
        return batches

    def left_out(self, num_residues: np.ndarray, row_length: int) -> np.ndarray:
        return np.zeros_like(num_residues)

    def _row(self, window: SampleWindow, ends: np.ndarray, start: int, size: int) -> PackedRow:
        stop = min(start + size, int(ends[-1]))
        place = self._place(window, ends, start)
        first = place.samples - window.start.samples
        last = int(np.searchsorted(ends, stop))
        samples = tuple(window.samples[first : last + 1].tolist())
        return PackedRow(place.epoch, place.samples, samples, place.tokens, stop - start)

    def _place(self, window: SampleWindow, ends: np.ndarray, token: int) -> Progress:
        """Returns the position of a token of the window's stream, or the end of the window."""
        number = int(np.searchsorted(ends, token, side="right"))
        if number == len(ends):
            return window.end
        begin = int(ends[number - 1]) if number else 0
        return Progress(window.start.epoch, window.start.samples + number, token - begin)
