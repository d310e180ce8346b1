"""The proteins of packed rows: where each of them begins and ends."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

# One protein for every 16 tokens, so that bounds have one size, and a compiled model one graph.
TOKENS_PER_PROTEIN = 16
# Padded rows are at most 2^(1/4) times as long as their proteins.
_LENGTHS_PER_DOUBLING = 4


def most_proteins(size: int) -> int:
    """Returns the most proteins of a row of some tokens."""
    return max(size // TOKENS_PER_PROTEIN, 1)


class Spans(np.ndarray):
    """Bounds of proteins, for whose number, unlike that of an array, no graph is compiled."""


class Bounds(NamedTuple):
    """The proteins of packed rows, which are joined to one row of L positions.

    They lie end to end, and the padding behind those of a row is divided into segments as well. The
    proteins of a family, which may see each other, lie end to end in one row.

    Attributes:
        cu_seqlens: the bounds of S segments, int32; the last ones are L if there are fewer.
        segment_L: the number of the segment of each position, int64.
        position_L: the position within the segment, int64.
        spans: the first position of each protein, and that after its last one; on the CPU.
        longest: the most positions of a segment.
        families: the bounds of families, whose `position_L` are those that layers of the family
            use; None where no protein sees another.
    """

    cu_seqlens: Tensor
    segment_L: Tensor
    position_L: Tensor
    spans: Spans
    longest: int
    families: "Bounds | None" = None

    @classmethod
    def of(
        cls,
        spans: Sequence[tuple[int, int]],
        shape: tuple[int, int],
        *,
        longest: int,
        families: Sequence[int] | None = None,
        running: bool = False,
        aligned: np.ndarray | None = None,
    ) -> Self:
        """Creates the bounds of rows of a shape from the spans of the proteins, in order.

        Args:
            longest: the most positions of a protein.
            families: the number of proteins of each family, in order.
            running: positions in layers of the family count from its start, not from that of each
                protein.
            aligned: positions there, int64 [rows * length].
        """
        rows, length = shape
        total, before, cuts = rows * length, 0, {0}
        for start, end in [*spans, (total, total)]:
            cuts.update(range(before, start, longest), (start, end))
            before = end
        # Rows of short proteins, which are not compiled, may need more.
        room = max(rows * (most_proteins(length) + length // longest + 1), len(cuts) - 1)
        bounds = np.full(room + 1, total, dtype=np.int32)
        bounds[: len(cuts)] = sorted(cuts)
        segment_L = np.repeat(np.arange(room), np.diff(bounds))
        numbers = bounds, segment_L, np.arange(total) - bounds[segment_L]
        ends, segment, position = map(torch.from_numpy, numbers)
        alone = cls(ends, segment, position, np.array(spans).view(Spans), longest)
        if families is None:
            return alone
        last = np.cumsum(families)
        joined = [
            (spans[end - n][0], spans[end - 1][1]) for n, end in zip(families, last, strict=True)
        ]
        above = cls.of(joined, shape, longest=length)
        if aligned is not None:
            above = above._replace(position_L=torch.from_numpy(aligned))
        elif not running:
            above = above._replace(position_L=position)
        return alone._replace(families=above)

    @property
    def members(self) -> list[slice]:
        """The numbers of the proteins of each family."""
        assert self.families is not None
        cuts = np.searchsorted(self.spans[:, 0], self.families.spans).tolist()
        return [slice(*one) for one in cuts]

    def pin_memory(self) -> Self:
        return self._make(x.pin_memory() if isinstance(x, Tensor | Bounds) else x for x in self)

    def to(self, device: torch.device) -> Self:
        return self._make(x.to(device) if isinstance(x, Tensor | Bounds) else x for x in self)

    def pieces(self, inputs: Sequence[Tensor]) -> tuple[list[tuple[Tensor, ...]], list[int]]:
        """Splits joined rows, 1HLK, at the bounds of proteins; returns which pieces are proteins.

        The others are padding.
        """
        cuts = np.unique([0, *self.spans.ravel(), len(self.segment_L)])
        # The gradient of each slice of a tensor would have the size of the tensor.
        parts = [x.split(np.diff(cuts).tolist(), dim=2) for x in inputs]
        places = np.searchsorted(cuts, self.spans[:, 0]).tolist()
        return [*zip(*parts, strict=True)], places

    def with_gaps(self, inputs: Sequence[Tensor], gap: int) -> tuple[Tensor, list[Tensor]]:
        """Returns the places of positions, L, in (..., L, K) with zeros around each segment.

        Also returns the latter, whose size depends on L and S alone.
        """
        place_L = torch.arange(len(self.segment_L), device=self.segment_L.device)
        place_L = place_L + gap * (self.segment_L + 1)
        room = len(place_L) + gap * len(self.cu_seqlens)
        return place_L, [
            x.new_zeros(*x.shape[:-2], room, x.shape[-1]).index_copy(-2, place_L, x) for x in inputs
        ]

    def padded_rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the positions of B proteins of similar length, BL, and the mask of padding."""
        kinds = np.ceil(_LENGTHS_PER_DOUBLING * np.log2(np.ptp(self.spans, axis=1)))
        for kind in np.unique(kinds):
            start_B1, end_B1 = np.split(self.spans[kinds == kind], 2, axis=1)
            place_BL = start_B1 + np.arange((end_B1 - start_B1).max())
            # Padding repeats the first position, and is masked.
            both = np.where(place_BL < end_B1, place_BL, start_B1), place_BL < end_B1
            place, mask = (torch.from_numpy(x).to(self.segment_L.device) for x in both)
            yield place, mask


def taken(x_1HLK: Tensor, place_BM: Tensor) -> Tensor:
    """Returns padded rows of a joined one, BHMK."""
    # The gradient of a selection is faster than that of an index.
    return x_1HLK[0].index_select(1, place_BM.flatten()).unflatten(1, place_BM.shape).movedim(1, 0)
