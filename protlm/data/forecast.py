"""What an epoch will be like: how much of it is cropped, and how much of its batches padding."""

from collections import Counter
from dataclasses import dataclass
from typing import final

import numpy as np

from protlm.data.batching import BatchRule, BatchStream, Lengths
from protlm.data.mixture import SampleOrder

# Up to so many samples all lengths are looked at, in a second or two; of more only those of the
# first window, which the first batch needs anyway.
_MOST_LOOKED_AT = 1 << 21


@final
@dataclass(frozen=True)
class Forecast:
    """An epoch in numbers.

    Attributes:
        cropped: sequences that are longer than a row.
        left_out: their residues that no row holds.
        is_exact: whether these two are counted, not estimated.
        useful_share: of the positions of the first window's batches, those that are no padding.
    """

    cropped: int
    left_out: int
    is_exact: bool
    useful_share: float

    def describe(self) -> str:
        """One line for a person."""
        about = "" if self.is_exact else "about "
        padding = f"{self.useful_share:.1%} of the positions of a batch are no padding"
        if not self.cropped:
            return padding
        return f"{about}{self.cropped:,} cropped ({self.left_out:,} residues); {padding}"


def forecast(lengths_of: Lengths, order: SampleOrder, rule: BatchRule) -> Forecast:
    """What the first epoch will be like.

    Args:
        lengths_of: residues of samples.
        order: in which samples come.
        rule: how samples become batches.
    """
    cropped = left_out = 0.0
    for start, row_length, scale in _looked_at(order, rule):
        positions = np.arange(start, min(start + rule.window_size, len(order)))
        residues = rule.left_out(lengths_of(order.draw(0, positions).samples), row_length)
        cropped += int(np.count_nonzero(residues)) * scale
        left_out += int(residues.sum()) * scale
    batches = BatchStream(lengths_of, order, rule).window(0, 0)
    return Forecast(
        cropped=round(cropped),
        left_out=round(left_out),
        is_exact=len(order) <= _MOST_LOOKED_AT,
        useful_share=sum(batch.num_tokens for batch in batches)
        / sum(len(batch.rows) * batch.length for batch in batches),
    )


def _looked_at(order: SampleOrder, rule: BatchRule) -> list[tuple[int, int, float]]:
    """Where windows begin, the length of a row, and for how many windows each of them stands."""
    starts = range(0, len(order), rule.window_size)
    if len(order) <= _MOST_LOOKED_AT:
        return [(start, rule.row_length(start), 1.0) for start in starts]
    # The first one stands for all others, whatever length the curriculum gives them.
    num_windows = Counter(map(rule.row_length, starts))
    num_per_window = len(order) / len(starts) / rule.window_size
    return [(0, length, number * num_per_window) for length, number in num_windows.items()]
