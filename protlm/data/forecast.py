"""What an epoch will be like: how much of it is cropped, and how much of its batches padding."""

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
    is_exact = len(order) <= _MOST_LOOKED_AT
    end = len(order) if is_exact else min(rule.window_size, len(order))
    cropped = left_out = 0
    for start in range(0, end, rule.window_size):
        positions = np.arange(start, min(start + rule.window_size, end))
        residues = rule.left_out(lengths_of(order.draw(0, positions).samples))
        cropped += int(np.count_nonzero(residues))
        left_out += int(residues.sum())
    scale = len(order) / end
    batches = BatchStream(lengths_of, order, rule).window(0, 0)
    return Forecast(
        cropped=round(cropped * scale),
        left_out=round(left_out * scale),
        is_exact=is_exact,
        useful_share=sum(batch.num_tokens for batch in batches)
        / sum(len(batch.rows) * batch.length for batch in batches),
    )
