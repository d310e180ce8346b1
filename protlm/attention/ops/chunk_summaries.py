"""Summaries of chunks, and the patterns of residues and summaries that a query sees."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from protlm.attention.ops.blocks import to_blocks, with_margins

# Past summaries are copied to every block of queries: smaller blocks would copy too much.
_LEAST_BLOCK = 64


def summary_weights(scores_BHLP: Tensor, mask_BL: Tensor, chunk: int) -> Tensor:
    """Computes the weights of positions in the P summaries of their chunk, BHSMP: a softmax.

    Padding has zero weight; an all-padding chunk is weighted uniformly.
    """
    floor = torch.finfo(scores_BHLP.dtype).min
    scores_BHLP = scores_BHLP.masked_fill(~mask_BL[:, None, :, None], floor)
    return to_blocks(scores_BHLP, chunk, value=floor).softmax(dim=3)


def summaries(x_BHLK: Tensor, weights_BHSMP: Tensor) -> Tensor:
    """Computes weighted means of the positions of every chunk, BHSPK; `x_BHLK` is 0 at padding."""
    return weights_BHSMP.mT @ to_blocks(x_BHLK, weights_BHSMP.shape[3])


@final
@dataclass(frozen=True)
class Pattern:
    """A pattern of the positions and chunk summaries that each of L queries sees.

    Bidirectionally: a segment with half a segment on each side, and one chunk for all. Causally: a
    window that ends at the query, and the chunks before its own. The positions and summaries
    gathered for a block of queries include all that one of its queries sees; masks hide the others.

    `block` is a segment, or whole chunks, so that summaries can be split into blocks as well;
    `reach` is the number of chunks before its own that a causal query sees, None for all.
    """

    length: int
    window: int
    chunk: int
    block: int
    reach: int | None

    @classmethod
    def segments(cls, length: int, window: int) -> "Pattern":
        """Creates the bidirectional pattern; of an odd segment, the half after it is larger."""
        window = min(window, length)
        return cls(length, window, chunk=length, block=window, reach=None)

    @classmethod
    def history(cls, length: int, window: int, chunk: int, memory: int | None) -> "Pattern":
        """Creates the causal pattern, of a window that includes the query itself.

        `memory` is rounded up to chunks; None for all positions before the chunk of a query.
        """
        reach = -(-(length if memory is None else memory) // chunk)
        # Clipped to the length of the sequence, which only saves work.
        window, chunk = min(window, length), min(chunk, length)
        chunks = -(-max(window, min(_LEAST_BLOCK, length)) // chunk)
        return cls(length, window, chunk, block=chunk * chunks, reach=reach)

    def near_in_blocks(self, x_BHLK: Tensor) -> Tensor:
        """Gathers positions for every block of queries, BHSMK; zeros beyond the ends."""
        half = self.window // 2
        before, after = (half, self.window - half) if self.reach is None else (self.window - 1, 0)
        return with_margins(to_blocks(x_BHLK, self.block), before=before, after=after)

    def far_in_blocks(self, x_BHSK: Tensor) -> Tensor:
        """Gathers summaries of S chunks for every block of queries; zeros beyond the ends."""
        if self.reach is None:
            return x_BHSK[:, :, None].expand(-1, -1, -(-self.length // self.block), -1, -1)
        chunks = to_blocks(x_BHSK, self.block // self.chunk)
        return with_margins(chunks, before=min(self.reach, x_BHSK.shape[2] - 1), after=0)

    def sees_position(self, query: Tensor, position: Tensor) -> Tensor:
        if self.reach is not None:
            return (query - self.window < position) & (position <= query)
        start = query // self.window * self.window - self.window // 2
        return (start <= position) & (position < start + 2 * self.window)

    def sees_chunk(self, query: Tensor, chunk: Tensor) -> Tensor:
        own = query // self.chunk
        if self.reach is None:
            return own == chunk
        return (own - self.reach <= chunk) & (chunk < own)

    def visible_in_blocks(self, mask_BL: Tensor, rank: int) -> Tensor:
        """Returns which summaries, then positions, queries of a block see: (B, 1, S, M, keys)."""
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
        """Returns the same for rows of the map, (B, 1, M, S · rank + L)."""
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
