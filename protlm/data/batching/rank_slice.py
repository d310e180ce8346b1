"""The part of each batch that a rank computes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankSlice:
    """The slices of a batch that a rank computes: `parts` of them, one after the other.

    A batch has `world_size * parts` = n slices, and slice s has the rows s, s + n, s + 2n, ... With
    `fill`, all slices of the same length have the same number of rows, also in the last batch of a
    window, so that they have the same shape. An optimizer step has `batches_per_step` batches.
    """

    rank: int = 0
    world_size: int = 1
    parts: int = 1
    fill: bool = False
    batches_per_step: int = 1

    @property
    def num_slices(self) -> int:
        """Number of slices of a batch."""
        return self.world_size * self.parts

    @property
    def slices(self) -> range:
        """Numbers of the slices of this rank."""
        return range(self.rank * self.parts, (self.rank + 1) * self.parts)
