"""Summaries of chunks, and the patterns of residues and summaries that a query sees."""

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from protlm.attention.ops.blocks import to_blocks, with_margins

# Past summaries are copied to every block of queries: smaller blocks would copy too much.
_LEAST_BLOCK = 64


def summary_weights(scores_BHLP: Tensor, mask_BL: Tensor, chunk: int) -> Tensor:
    """Computes the weights of positions in the P summaries of their chunk: softmax over the chunk.

    Padding has zero weight; an all-padding chunk is weighted uniformly.

    Returns:
        BHSMP: S chunks of M = `chunk` positions.
    """
    floor = torch.finfo(scores_BHLP.dtype).min
    scores_BHLP = scores_BHLP.masked_fill(~mask_BL[:, None, :, None], floor)
    return to_blocks(scores_BHLP, chunk, value=floor).softmax(dim=3)


def summaries(x_BHLK: Tensor, weights_BHSMP: Tensor) -> Tensor:
    """Computes weighted means of the positions of every chunk, BHSPK; `x_BHLK` is 0 at padding."""
    return weights_BHSMP.mT @ to_blocks(x_BHLK, weights_BHSMP.shape[3])


class Pattern(ABC):
    """A pattern of the positions and chunk summaries that each of L queries sees.

    The positions and summaries gathered for a block of queries include all that one of its queries
    sees; `sees_position` and `sees_chunk` mask the others. Windows and chunks are clipped to the
    length of the sequence, which only saves work.

    Args:
        length: positions L.
        window: positions of a window or segment, at most L.
        chunk: positions of a chunk, at most L.
        block: queries in a block.
    """

    def __init__(self, length: int, *, window: int, chunk: int, block: int) -> None:
        self.length, self.window, self.chunk, self.block = length, window, chunk, block

    @abstractmethod
    def near_in_blocks(self, x_BHLK: Tensor) -> Tensor:
        """Gathers positions for every block of queries, BHSMK; zeros beyond the ends."""

    @abstractmethod
    def far_in_blocks(self, x_BHSK: Tensor) -> Tensor:
        """Gathers summaries of S chunks for every block of queries; zeros beyond the ends."""

    @abstractmethod
    def sees_position(self, query: Tensor, position: Tensor) -> Tensor:
        """Returns whether the query at one position sees another position; both broadcast."""

    @abstractmethod
    def sees_chunk(self, query: Tensor, chunk: Tensor) -> Tensor:
        """Returns whether the query at a position sees the summaries of a chunk; both broadcast."""

    def visible_in_blocks(self, mask_BL: Tensor, rank: int) -> Tensor:
        """Returns the mask of visible summaries, then positions, of the queries of every block.

        Returns:
            (B, 1, S, M, keys).
        """
        position = torch.arange(self.length, device=mask_BL.device)[None, None, :, None]
        has_residue = self._has_residue(mask_BL)
        chunk = torch.arange(has_residue.shape[2], device=mask_BL.device)[None, None, :, None]
        query = to_blocks(position, self.block)
        near = self.sees_position(query, self.near_in_blocks(position).mT)
        near = near & self.near_in_blocks(mask_BL[:, None, :, None]).mT
        far = self.sees_chunk(query, self.far_in_blocks(chunk).mT)
        far = far & self.far_in_blocks(has_residue).mT
        return torch.cat([far.repeat_interleave(rank, dim=-1), near], dim=-1)

    def visible_in_rows(self, mask_BL: Tensor, rows: slice, rank: int) -> Tensor:
        """Returns the mask of visible summaries and positions of rows, (B, 1, M, S · rank + L)."""
        position = torch.arange(self.length, device=mask_BL.device)
        query = position[rows, None]
        has_residue = self._has_residue(mask_BL).mT
        chunk = torch.arange(has_residue.shape[3], device=mask_BL.device)
        near = self.sees_position(query, position) & mask_BL[:, None, None, :]
        far = self.sees_chunk(query, chunk) & has_residue
        both = torch.cat([far.repeat_interleave(rank, dim=-1), near], dim=-1)
        return both & mask_BL[:, None, rows, None]

    def _has_residue(self, mask_BL: Tensor) -> Tensor:
        return to_blocks(mask_BL[:, None, :, None], self.chunk).any(dim=3)


@final
class Segments(Pattern):
    """The bidirectional pattern: segments with half a segment on each side, and one chunk for all.

    Args:
        length: positions L.
        window: positions of a segment; if odd, the half after it is the larger one.
    """

    def __init__(self, length: int, window: int) -> None:
        window = min(window, length)
        super().__init__(length, window=window, chunk=length, block=window)

    def near_in_blocks(self, x_BHLK: Tensor) -> Tensor:
        half = self.window // 2
        segments = to_blocks(x_BHLK, self.window)
        return with_margins(segments, before=half, after=self.window - half)

    def far_in_blocks(self, x_BHSK: Tensor) -> Tensor:
        return x_BHSK[:, :, None].expand(-1, -1, -(-self.length // self.window), -1, -1)

    def sees_position(self, query: Tensor, position: Tensor) -> Tensor:
        start = query // self.window * self.window - self.window // 2
        return (start <= position) & (position < start + 2 * self.window)

    def sees_chunk(self, query: Tensor, chunk: Tensor) -> Tensor:
        """See `Pattern.sees_chunk`: always true."""
        return query // self.chunk == chunk


@final
class History(Pattern):
    """The causal pattern: a window that ends at the query, and the chunks before its own.

    Args:
        length: positions L.
        window: positions that a query sees, itself included.
        chunk: positions of a chunk.
        memory: positions before the chunk of a query whose summaries it sees, rounded up to
            chunks; None for all.
    """

    def __init__(self, length: int, window: int, chunk: int, memory: int | None) -> None:
        # The number of chunks before its own that a query sees.
        self.reach = -(-(length if memory is None else memory) // chunk)
        window, chunk = min(window, length), min(chunk, length)
        # A block consists of whole chunks, so that summaries can be split into blocks as well.
        chunks = -(-max(window, min(_LEAST_BLOCK, length)) // chunk)
        super().__init__(length, window=window, chunk=chunk, block=chunk * chunks)

    def near_in_blocks(self, x_BHLK: Tensor) -> Tensor:
        return with_margins(to_blocks(x_BHLK, self.block), before=self.window - 1, after=0)

    def far_in_blocks(self, x_BHSK: Tensor) -> Tensor:
        chunks = to_blocks(x_BHSK, self.block // self.chunk)
        return with_margins(chunks, before=min(self.reach, x_BHSK.shape[2] - 1), after=0)

    def sees_position(self, query: Tensor, position: Tensor) -> Tensor:
        return (query - self.window < position) & (position <= query)

    def sees_chunk(self, query: Tensor, chunk: Tensor) -> Tensor:
        own = query // self.chunk
        return (own - self.reach <= chunk) & (chunk < own)
