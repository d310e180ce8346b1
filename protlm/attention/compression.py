"""Sequences compressed chunk by chunk, and which residues and summaries a query sees of them."""

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from protlm.attention.blocks import to_blocks, with_margins

# Summaries of the past are copied to every block of queries: smaller blocks would copy too much.
_LEAST_BLOCK = 64


def summary_weights(scores_BHLP: Tensor, mask_BL: Tensor, chunk: int) -> Tensor:
    """How much each position of a chunk weighs in each of its P summaries: softmax over the chunk.

    Padding weighs nothing; in a chunk of nothing else all weigh alike.

    Returns:
        BHSMP: S chunks of M = `chunk` positions.
    """
    floor = torch.finfo(scores_BHLP.dtype).min
    scores_BHLP = scores_BHLP.masked_fill(~mask_BL[:, None, :, None], floor)
    return to_blocks(scores_BHLP, chunk, value=floor).softmax(dim=3)


def summaries(x_BHLK: Tensor, weights_BHSMP: Tensor) -> Tensor:
    """Weighted means of the positions of every chunk, BHSPK; `x_BHLK` is 0 at padding."""
    return weights_BHSMP.mT @ to_blocks(x_BHLK, weights_BHSMP.shape[3])


class Pattern(ABC):
    """Which positions and which chunks' summaries each of L queries sees, and how to gather them.

    Beside every block of queries stands at least all that one of them sees; `sees_position` and
    `sees_chunk` say which query sees what. A window and a chunk are at most as long as the
    sequence, which changes nothing but the work.

    Args:
        length: positions L.
        window: positions of a window or segment, at most L.
        chunk: positions of a chunk, at most L.
        block: queries that are worked on together.
    """

    def __init__(self, length: int, *, window: int, chunk: int, block: int) -> None:
        self.length, self.window, self.chunk, self.block = length, window, chunk, block

    @abstractmethod
    def near_in_blocks(self, x_BHLK: Tensor) -> Tensor:
        """The positions beside every block of queries, BHSMK; zeros beyond the ends."""

    @abstractmethod
    def far_in_blocks(self, x_BHSK: Tensor) -> Tensor:
        """What there is of S chunks, beside every block of queries; zeros beyond the ends."""

    @abstractmethod
    def sees_position(self, query: Tensor, position: Tensor) -> Tensor:
        """Whether the query at one position sees another position; the two broadcast."""

    @abstractmethod
    def sees_chunk(self, query: Tensor, chunk: Tensor) -> Tensor:
        """Whether the query at a position sees the summaries of a chunk; the two broadcast."""

    def visible_in_blocks(self, mask_BL: Tensor, rank: int) -> Tensor:
        """Whether a query of a block sees the summaries, then the positions, beside the block.

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
        """Whether queries of some rows see all summaries and positions: (B, 1, M, S · rank + L)."""
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
    """Both directions: a query's segment, half a segment on each side, and one chunk, the whole.

    Args:
        length: positions L.
        window: positions of a segment; if odd, the half behind it is the larger one.
    """

    def __init__(self, length: int, window: int) -> None:
        window = min(window, length)
        super().__init__(length, window=window, chunk=length, block=window)

    def near_in_blocks(self, x_BHLK: Tensor) -> Tensor:
        """See `Pattern.near_in_blocks`."""
        half = self.window // 2
        segments = to_blocks(x_BHLK, self.window)
        return with_margins(segments, before=half, after=self.window - half)

    def far_in_blocks(self, x_BHSK: Tensor) -> Tensor:
        """See `Pattern.far_in_blocks`."""
        return x_BHSK[:, :, None].expand(-1, -1, -(-self.length // self.window), -1, -1)

    def sees_position(self, query: Tensor, position: Tensor) -> Tensor:
        """See `Pattern.sees_position`."""
        start = query // self.window * self.window - self.window // 2
        return (start <= position) & (position < start + 2 * self.window)

    def sees_chunk(self, query: Tensor, chunk: Tensor) -> Tensor:
        """See `Pattern.sees_chunk`: always."""
        return query // self.chunk == chunk


@final
class History(Pattern):
    """Causal: a query itself, the window - 1 positions before it, and chunks before its own.

    Args:
        length: positions L.
        window: positions that a query sees, itself included.
        chunk: positions of a chunk.
        memory: positions before its own chunk whose chunks a query sees, rounded up to chunks;
            None for all.
    """

    def __init__(self, length: int, window: int, chunk: int, memory: int | None) -> None:
        # Chunks before its own that a query sees.
        self.reach = -(-(length if memory is None else memory) // chunk)
        window, chunk = min(window, length), min(chunk, length)
        # A block is of whole chunks, so that their summaries come in blocks as well.
        chunks = -(-max(window, min(_LEAST_BLOCK, length)) // chunk)
        super().__init__(length, window=window, chunk=chunk, block=chunk * chunks)

    def near_in_blocks(self, x_BHLK: Tensor) -> Tensor:
        """See `Pattern.near_in_blocks`."""
        return with_margins(to_blocks(x_BHLK, self.block), before=self.window - 1, after=0)

    def far_in_blocks(self, x_BHSK: Tensor) -> Tensor:
        """See `Pattern.far_in_blocks`."""
        chunks = to_blocks(x_BHSK, self.block // self.chunk)
        return with_margins(chunks, before=min(self.reach, x_BHSK.shape[2] - 1), after=0)

    def sees_position(self, query: Tensor, position: Tensor) -> Tensor:
        """See `Pattern.sees_position`."""
        return (query - self.window < position) & (position <= query)

    def sees_chunk(self, query: Tensor, chunk: Tensor) -> Tensor:
        """See `Pattern.sees_chunk`."""
        own = query // self.chunk
        return (own - self.reach <= chunk) & (chunk < own)
