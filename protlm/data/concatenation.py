"""Rows cut from sequences that are joined by `<eos>` (arXiv 2009.14794: 8,192 tokens each).

A row is `<cls>` and the next tokens of the stream: the model learns `<cls>`, which stands before
every sequence it is later asked about. Positions run through the row, and attention crosses from
one sequence to the next, as in the paper.
"""

from dataclasses import dataclass
from typing import final

import numpy as np

from protlm.data.batching import BatchRule, GlobalBatch, Progress, Sequences, Window
from protlm.data.masking import row_rng
from protlm.data.vocabulary import VOCABULARY


@final
@dataclass(frozen=True)
class StretchRow:
    """`<cls>`, then a stretch of the stream of sequences that are each followed by `<eos>`.

    Attributes:
        epoch: that the stretch belongs to.
        position: of its first sample in the order of the epoch.
        samples: the sequences it has a part of, in order.
        skip: tokens of the first that come before it.
        num_tokens: of the stretch, `<cls>` not counted.
    """

    epoch: int
    position: int
    samples: tuple[int, ...]
    skip: int
    num_tokens: int

    @property
    def sample(self) -> int:
        """The first of them."""
        return self.samples[0]

    def read(self, sequences: Sequences, *, seed: int) -> tuple[np.ndarray, np.random.Generator]:
        """See `Row`."""
        parts: list[np.ndarray | list[int]] = []
        for sample in self.samples:
            parts += [sequences[sample], [VOCABULARY.eos]]
        stretch = np.concatenate(parts)[self.skip : self.skip + self.num_tokens]
        rng = row_rng(seed, self.epoch, self.position, self.skip)
        return np.concatenate(([VOCABULARY.cls], stretch)), rng


@final
@dataclass(frozen=True)
class Concatenation(BatchRule):
    """Joins the samples of a window in their order, and cuts them into rows of `max_length`.

    No token is dropped or repeated; only a window's last row is shorter.
    """

    def batches(self, window: Window) -> list[GlobalBatch]:
        """See `BatchRule`."""
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
        """See `BatchRule`."""
        return np.zeros_like(num_residues)

    def _row(self, window: Window, ends: np.ndarray, start: int, size: int) -> StretchRow:
        stop = min(start + size, int(ends[-1]))
        place = self._place(window, ends, start)
        first = place.samples - window.start.samples
        last = int(np.searchsorted(ends, stop))
        return StretchRow(
            epoch=place.epoch,
            position=place.samples,
            samples=tuple(window.samples[first : last + 1].tolist()),
            skip=place.tokens,
            num_tokens=stop - start,
        )

    def _place(self, window: Window, ends: np.ndarray, token: int) -> Progress:
        """The place of a token of the window's stream, or the end of the window."""
        number = int(np.searchsorted(ends, token, side="right"))
        if number == len(ends):
            return window.end
        begin = int(ends[number - 1]) if number else 0
        return Progress(window.start.epoch, window.start.samples + number, token - begin)
