"""Forecast of an epoch: how much of it is cropped, and the padding of its batches."""

from collections import Counter
from dataclasses import dataclass
from typing import final

import numpy as np

from protlm.data.batching.mixture import SampleOrder
from protlm.data.batching.plan import BatchingStrategy, BatchStream, Lengths

# Up to this number of samples, all lengths are read, in a second or two; beyond it, only those of
# the first window, which the first batch needs anyway.
_MAX_EXACT = 1 << 21


@final
@dataclass(frozen=True)
class Forecast:
    """Statistics of an epoch.

    Attributes:
        cropped: number of sequences that are longer than a row.
        left_out: number of their residues that are cropped.
        is_exact: whether these two numbers are exact or estimated.
        useful_fraction: fraction of the first window's positions that are not padding.
    """

    cropped: int
    left_out: int
    is_exact: bool
    useful_fraction: float

    def describe(self) -> str:
        """Describes the forecast in one line."""
        about = "" if self.is_exact else "about "
        padding = f"{1 - self.useful_fraction:.1%} of the positions of a batch are padding"
        if not self.cropped:
            return padding
        return f"{about}{self.cropped:,} cropped ({self.left_out:,} residues); {padding}"


def forecast(lengths_of: Lengths, order: SampleOrder, rule: BatchingStrategy) -> Forecast:
    """Predicts the statistics of the first epoch.

    Args:
        lengths_of: lengths of samples in residues.
        order: order of the samples.
        rule: assigns samples to batches.
    """
    cropped = left_out = 0.0
    for start, row_length, scale in _sampled_windows(order, rule):
        positions = np.arange(start, min(start + rule.window_size, len(order)))
        residues = rule.left_out(lengths_of(order.draw(0, positions).samples), row_length)
        cropped += int(np.count_nonzero(residues)) * scale
        left_out += int(residues.sum()) * scale
    batches = BatchStream(lengths_of, order, rule).window(0, 0)
    return Forecast(
        cropped=round(cropped),
        left_out=round(left_out),
        is_exact=len(order) <= _MAX_EXACT,
        useful_fraction=sum(batch.num_tokens for batch in batches)
        / sum(len(batch.rows) * batch.length for batch in batches),
    )


def _sampled_windows(order: SampleOrder, rule: BatchingStrategy) -> list[tuple[int, int, float]]:
    """Returns the starts of windows, their row lengths, and the windows that each represents."""
    starts = range(0, len(order), rule.window_size)
    if len(order) <= _MAX_EXACT:
        return [(start, rule.row_length(start), 1.0) for start in starts]
    # The first window represents all others, for each length of the curriculum.
    num_windows = Counter(map(rule.row_length, starts))
    num_per_window = len(order) / len(starts) / rule.window_size
    return [(0, length, number * num_per_window) for length, number in num_windows.items()]
