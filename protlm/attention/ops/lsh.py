"""Locality-sensitive hashing by angle, and the layout of buckets in chunks (arXiv 2001.04451).

Vectors of similar directions often have the same bucket. The layout makes the positions of a
bucket adjacent in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.ops.numerics import at_once
from protlm.attention.ops.projection import projection_generator

# The elements of the weights of a tile of chunks; on a CPU they stay in cache.
_CPU_NUMBERS, _GPU_NUMBERS = 1 << 19, 1 << 26


def draw_rotations(
    seed: int, index: int, *, num_hashes: int, num_heads: int, head_dim: int, num_buckets: int
) -> Tensor:
    """Returns draw number `index` of the Gaussian rotations, THKR in float64.

    A pure function of (seed, index) and the sizes; R = ⌈num_buckets / 2⌉ columns.
    """
    shape = (num_hashes, num_heads, head_dim, (num_buckets + 1) // 2)
    return torch.randn(shape, generator=projection_generator(seed, index), dtype=torch.float64)


@torch.no_grad()
def hash_buckets(x_BHLK: Tensor, rotations_THKR: Tensor, num_buckets: int) -> Tensor:
    """Computes the bucket of every vector in every round, h(x) = argmax [x R; -x R] (section 2).

    TBHL, numbers from 0 to num_buckets - 1. Hashes are always computed in float32, so that a
    float64 copy of a model has the same buckets.
    """
    x_BHLK = x_BHLK.float()
    batch, heads, _, _ = x_BHLK.shape
    # The products have a column per pair of buckets, whose number grows with the longest input:
    # one round and some of the positions are computed at a time.
    pairs = batch * heads * rotations_THKR.shape[-1]
    size = at_once(x_BHLK, pairs, cpu=_CPU_NUMBERS, gpu=_GPU_NUMBERS)
    rounds = [
        torch.cat([_sides(part @ rotations_HKR) for part in x_BHLK.split(size, dim=2)], dim=2)
        for rotations_HKR in rotations_THKR.float()
    ]
    # A single bucket contains both sides of its rotation.
    return torch.stack(rounds) % num_buckets


def _sides(rotated_BHLR: Tensor) -> Tensor:
    """Computes argmax [x R; -x R], BHL."""
    largest_BHL, positive_BHL = rotated_BHLR.max(dim=-1)
    smallest_BHL, negative_BHL = rotated_BHLR.min(dim=-1)
    negative_BHL = negative_BHL + rotated_BHLR.shape[-1]
    return torch.where(-smallest_BHL > largest_BHL, negative_BHL, positive_BHL)


class Layout(NamedTuple):
    """The layout of positions in each round: sorted by bucket, and each bucket starts a chunk.

    The chunk of a position in its bucket, and its slot in the chunk, depend only on the earlier
    positions of the bucket; later positions can only move whole chunks. Every round has the same
    number of chunks, so that some are empty; chunk 0 is always empty. Positions are numbered from 0
    to N - 1, and N denotes an empty slot.

    Attributes:
        positions: (T, chunks, size), the position in each slot.
        slots: (T, N), the slot of each position, counted over all chunks; 0 for no slot.
        chunk_ids: (T, N + 1). Positions with equal ids are in the same chunk. Positions whose ids
            differ by 1 are in consecutive chunks of the same bucket.
    """

    positions: Tensor
    slots: Tensor
    chunk_ids: Tensor

    @property
    def num_slots(self) -> int:
        return self.positions[0].numel()


def most_chunks(number: int, *, num_buckets: int, size: int) -> int:
    """Returns the most chunks that positions need: a bucket leaves at most size - 1 slots empty."""
    return (number + min(num_buckets, number) * (size - 1)) // size


@torch.no_grad()
def lay_out(buckets: Tensor, *, num_buckets: int, size: int) -> Layout:
    """Sorts positions by bucket, then by position, and splits every bucket into chunks of `size`.

    `buckets` are (T, N); a position with bucket `num_buckets` gets no slot.
    """
    rounds, number = buckets.shape
    ordered, positions = buckets.sort(dim=-1, stable=True)
    edges = torch.arange(num_buckets + 1, device=buckets.device).repeat(rounds, 1)
    starts = torch.searchsorted(ordered, edges)
    chunks = (starts.diff(dim=-1) + size - 1) // size
    first_chunks = F.pad(1 + chunks.cumsum(dim=-1) - chunks, (0, 1))
    ranks = torch.arange(number, device=buckets.device) - starts.gather(-1, ordered)
    slots = first_chunks.gather(-1, ordered) * size + ranks
    slots = slots.masked_fill(ordered == num_buckets, 0)
    if buckets.device.type == "cpu":
        num_chunks = 1 + int(chunks.sum(dim=-1).max())
    else:
        # Reading the number would synchronize a GPU.
        num_chunks = 1 + most_chunks(number, num_buckets=num_buckets, size=size)
    held = torch.full((rounds, num_chunks * size), number, device=buckets.device)
    held.scatter_(-1, slots, positions)
    # Positions without a slot were written to slot 0.
    held[:, 0] = number
    # An id is skipped between buckets, so that their chunks are not consecutive.
    ids = (slots // size + ordered).int()
    return Layout(
        positions=held.unflatten(-1, (num_chunks, size)),
        slots=torch.empty_like(slots).scatter_(-1, positions, slots),
        chunk_ids=F.pad(torch.empty_like(ids).scatter_(-1, positions, ids), (0, 1), value=-2),
    )


@dataclass(frozen=True)
class Tile:
    """S chunks of M slots of a round; each sees L = 2M slots: the previous chunk and itself.

    `positions` are those in the slots of the chunks and of the previous one, (S + 1) · M;
    `hidden_SML` is true where a query does not see a key.
    """

    slots: slice
    positions: Tensor
    hidden_SML: Tensor

    @property
    def size(self) -> int:
        return self.hidden_SML.shape[1]

    @property
    def slots_before(self) -> slice:
        return slice(self.slots.start - self.size, self.slots.stop - self.size)

    def own(self, x: Tensor) -> Tensor:
        """Gathers the rows of x in the chunks, (S, M, width)."""
        return x.index_select(0, self.positions[self.size :]).unflatten(0, (-1, self.size))

    def seen(self, x: Tensor) -> Tensor:
        """Gathers the rows of x that the chunks see, (S, L, width), a view with overlaps."""
        return x.index_select(0, self.positions).unfold(0, 2 * self.size, self.size).mT

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Computes q kᵀ, (S, M, L), including hidden entries."""
        return self.own(q) @ self.seen(k).mT


def tiles(rounds: Layout, index: int, *, causal: bool, width: int) -> Iterator[Tile]:
    """Splits round number `index` into tiles; `width` is that of the values."""
    positions = rounds.positions[index]
    num_chunks, size = positions.shape
    # Within a bucket, slots are in the order of positions. A position does not see itself.
    own_MM = torch.ones(size, size, dtype=torch.bool, device=positions.device)
    own_MM = own_MM.triu() if causal else own_MM.tril().triu()
    hidden_ML = F.pad(own_MM, (size, 0))
    weights = size * max(2 * size, width)
    step = at_once(positions, weights, cpu=_CPU_NUMBERS, gpu=_GPU_NUMBERS)
    for start in range(1, num_chunks, step):
        stop = min(start + step, num_chunks)
        in_tile = positions[start - 1 : stop].flatten()
        hidden_SML = hidden_ML | ~_are_together(rounds.chunk_ids[index], in_tile, size)
        # A pair counts in the first round in which it is visible.
        for chunk_ids in rounds.chunk_ids[:index]:
            hidden_SML |= _are_together(chunk_ids, in_tile, size)
        yield Tile(slice(start * size, stop * size), in_tile, hidden_SML)


def _are_together(chunk_ids: Tensor, positions: Tensor, size: int) -> Tensor:
    """Returns whether queries of a tile are in the chunk of a key or in the next one, (S, M, L)."""
    ids = chunk_ids.index_select(0, positions)
    ids_SM1 = ids[size:].view(-1, size, 1)
    ids_S1L = ids.unfold(0, 2 * size, size)[:, None]
    return (ids_SM1 == ids_S1L) | (ids_SM1 == ids_S1L + 1)
