"""Reformer: attention within the buckets of a hash (Kitaev et al., arXiv 2001.04451)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from protlm.attention.base import Attention, Context, RandomFeatures
from protlm.attention.ops.numerics import accum_dtype, at_once, no_autocast, zero_padding
from protlm.attention.ops.projection import projection_generator
from protlm.config.fields import Range, at_least

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
    size = at_once(
        x_BHLK, batch * heads * rotations_THKR.shape[-1], cpu=_CPU_NUMBERS, gpu=_GPU_NUMBERS
    )
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
    return torch.where(
        -smallest_BHL > largest_BHL, negative_BHL + rotated_BHLR.shape[-1], positive_BHL
    )


class RoundLayout(NamedTuple):
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
def lay_out(buckets: Tensor, *, num_buckets: int, size: int) -> RoundLayout:
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
    if buckets.device.type == "cpu" and not is_compiling():
        num_chunks = 1 + int(chunks.sum(dim=-1).max())
    else:
        # Reading the number would synchronize a GPU, and end a graph.
        num_chunks = 1 + most_chunks(number, num_buckets=num_buckets, size=size)
    held = torch.full((rounds, num_chunks * size), number, device=buckets.device)
    held.scatter_(-1, slots, positions)
    # Positions without a slot were written to slot 0.
    held[:, 0] = number
    # An id is skipped between buckets, so that their chunks are not consecutive.
    ids = (slots // size + ordered).int()
    return RoundLayout(
        positions=held.unflatten(-1, (num_chunks, size)),
        slots=torch.empty_like(slots).scatter_(-1, positions, slots),
        chunk_ids=F.pad(torch.empty_like(ids).scatter_(-1, positions, ids), (0, 1), value=-2),
    )


@dataclass(frozen=True)
class ChunkTile:
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

    def own(self, x: Tensor) -> Tensor:
        """Gathers the rows of x in the chunks, (S, M, width)."""
        return x.index_select(0, self.positions[self.size :]).unflatten(0, (-1, self.size))

    def seen(self, x: Tensor) -> Tensor:
        """Gathers the rows of x that the chunks see, (S, L, width), a view with overlaps."""
        return x.index_select(0, self.positions).unfold(0, 2 * self.size, self.size).mT

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Computes q kᵀ, (S, M, L), including hidden entries."""
        return self.own(q) @ self.seen(k).mT


def tiles(rounds: RoundLayout, index: int, *, causal: bool, width: int) -> Iterator[ChunkTile]:
    """Splits round number `index` into tiles; `width` is that of the values."""
    positions = rounds.positions[index]
    num_chunks, size = positions.shape
    # Within a bucket, slots are in the order of positions. A position does not see itself.
    own_MM = torch.ones(size, size, dtype=torch.bool, device=positions.device)
    own_MM = own_MM.triu() if causal else own_MM.tril().triu()
    hidden_ML = F.pad(own_MM, (size, 0))
    step = at_once(positions, size * max(2 * size, width), cpu=_CPU_NUMBERS, gpu=_GPU_NUMBERS)
    for start in range(1, num_chunks, step):
        stop = min(start + step, num_chunks)
        in_tile = positions[start - 1 : stop].flatten()
        hidden_SML = hidden_ML | ~_are_together(rounds.chunk_ids[index], in_tile, size)
        # A pair counts in the first round in which it is visible.
        for chunk_ids in rounds.chunk_ids[:index]:
            hidden_SML |= _are_together(chunk_ids, in_tile, size)
        yield ChunkTile(slice(start * size, stop * size), in_tile, hidden_SML)


def _are_together(chunk_ids: Tensor, positions: Tensor, size: int) -> Tensor:
    """Returns whether queries of a tile are in the chunk of a key or in the next one, (S, M, L)."""
    ids = chunk_ids.index_select(0, positions)
    ids_SM1 = ids[size:].view(-1, size, 1)
    ids_S1L = ids.unfold(0, 2 * size, size)[:, None]
    return (ids_SM1 == ids_S1L) | (ids_SM1 == ids_S1L + 1)


# Added to |q|², so that a query of 0 has a gradient.
_EPSILON = 1e-12

# Each column of a rotation makes two buckets.
_ONE_OR_EVEN = Range("1 or an even number", lambda x: x == 1 or (x > 0 and x % 2 == 0))


@final
class Reformer(Attention, RandomFeatures):
    """Exact softmax over the positions that random hashes put together; keys are the queries.

    In every round the hash h(x) = argmax [x R; -x R] sorts positions into buckets; a bucket's
    positions, in their order, are cut into chunks, and a position sees those in its own chunk and
    in the chunk before it in the bucket, and never those in the next one, even where the future is
    visible. Let P_i be the positions other than i that i sees in any round, and k_j = q_j / |q_j|
    (section 2, eqs. 2-6):

        o_i = Σ_{j ∈ P_i} exp(q_i·k_j - z_i) v_j,   z_i = log Σ_{j ∈ P_i} exp(q_i·k_j)

    and o_i = v_i where P_i is empty: a position sees itself only as a last resort. Rounds are
    combined by their logsumexp, and a pair that occurs in several rounds counts in the first of
    them; the paper counts 1/N of it in each of the N rounds, with the same sum (appendix A). The
    `k_BHLK` argument is ignored. Queries that are 0 get a key of 0: |q| is √(|q|² + 1e-12).

    Deviations from the paper:

    - The paper cuts chunks from all sorted positions, so that the edges of a chunk depend on the
      buckets of later positions, and outputs leak information about the future. Here chunks are
      counted from the start of each bucket, by position.
    - The paper has n buckets with chunks of 2 L / n positions, twice the mean size of a bucket: n =
      2 L / chunk. The default here is about half of that, `max_length` / chunk; longer inputs work,
      with fuller buckets. `num_buckets` sets another number.
    - The paper's eq. 1 divides by √K; the released code does so with keys of norm √K. The logits
      here are those of the released code.
    - Rotations are drawn once, or every `redraw_every` steps, not for every batch.
    - The weight of a position for itself as a last resort is exact, not a logit of -1e5.
    """

    shares_query_key: ClassVar[bool] = True
    cost: ClassVar[str] = "num_hashes L (chunk + num_buckets) K"
    advice: ClassVar[str] = (
        "thousands of positions, few of which matter to each; set num_buckets for the usual length"
    )
    rotations: Tensor

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_length: int,
        chunk: Annotated[int, at_least(1)] = 64,
        num_hashes: Annotated[int, at_least(1)] = 4,
        num_buckets: Annotated[int | None, _ONE_OR_EVEN] = None,
        redraw_every: Annotated[int | None, at_least(1)] = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if num_buckets is None:
            # Inputs of one chunk need one bucket, in which nothing is lost to hashing.
            num_buckets = 1 if max_length <= chunk else 2 * max(max_length // (2 * chunk), 1)
        self.chunk = chunk
        self.num_buckets = num_buckets
        self.redraw_every = redraw_every
        self._seed = seed
        self._sizes = {
            "num_hashes": num_hashes,
            "num_heads": num_heads,
            "head_dim": head_dim,
            "num_buckets": num_buckets,
        }
        self.register_buffer("rotations", draw_rotations(seed, 0, **self._sizes).float())

    def redraw(self, index: int) -> None:
        self.rotations.copy_(draw_rotations(self._seed, index, **self._sizes))

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        mask_BL, causal = context.mask_BL, context.causal
        dtype = torch.promote_types(accum_dtype(q_BHLK), accum_dtype(v_BHLC))
        # The positions of all samples and heads, followed by a row of zeros for empty slots.
        q, v = (
            F.pad(zero_padding(x, mask_BL).to(dtype).flatten(0, 2), (0, 0, 0, 1))
            for x in (q_BHLK, v_BHLC)
        )
        with no_autocast(q_BHLK):
            k = q * (q.square().sum(dim=-1, keepdim=True) + _EPSILON).rsqrt()
            out = _ChunkedSoftmax.apply(q, k, v, causal, *self._layout(q_BHLK, mask_BL))
        assert isinstance(out, Tensor)
        return out.view(v_BHLC.shape).to(v_BHLC.dtype)

    def _layout(self, q_BHLK: Tensor, mask_BL: Tensor) -> RoundLayout:
        """Lays out the chunks of all samples and heads, each with its own buckets."""
        batch, heads, length, _ = q_BHLK.shape
        buckets_TBHL = hash_buckets(q_BHLK, self.rotations, self.num_buckets)
        rows_BH = torch.arange(batch * heads, device=q_BHLK.device).view(batch, heads)
        buckets_TBHL = buckets_TBHL + self.num_buckets * rows_BH[..., None]
        num_buckets = self.num_buckets * batch * heads
        buckets_TBHL = buckets_TBHL.masked_fill(~mask_BL[:, None], num_buckets)
        # One chunk of L positions contains the same as a longer one.
        return lay_out(
            buckets_TBHL.flatten(1), num_buckets=num_buckets, size=min(self.chunk, length)
        )


class _ChunkedSoftmax(torch.autograd.Function):
    """Softmax over the chunks: `apply(q, k, v, causal, *layout)` returns N positions, (N, C).

    Queries, keys and values are (N + 1, width), the last row 0. Weights exist for one tile of
    chunks at a time. Because all rounds are one softmax, its gradient needs only the logarithm of
    the total: weights are recomputed from it, and no result of a single round is stored.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, *layout: Tensor) -> Tensor:
        rounds = RoundLayout(*layout)
        floor = torch.finfo(q.dtype).min / 2
        out = torch.zeros_like(v[:-1])
        log_total = torch.full_like(out[:, :1], floor)
        # Padding has no slot: it reads slot 0, which stays 0.
        in_slots = v.new_zeros(rounds.num_slots, v.shape[-1])
        log_total_in_slots = v.new_zeros(rounds.num_slots, 1)
        for index, slots in enumerate(rounds.slots):
            for tile in tiles(rounds, index, causal=causal, width=v.shape[-1]):
                logits_SML = tile.logits(q, k).masked_fill_(tile.hidden_SML, floor)
                top_SM1 = logits_SML.amax(dim=-1, keepdim=True)
                weights_SML = logits_SML.softmax(dim=-1)
                # The largest weight is exp(top - log total), which avoids a second exponential.
                log_total_SM1 = top_SM1 - weights_SML.amax(dim=-1, keepdim=True).log_()
                in_slots[tile.slots] = (weights_SML @ tile.seen(v)).flatten(0, 1)
                log_total_in_slots[tile.slots] = log_total_SM1.flatten(0, 1)
            before, here = log_total, log_total_in_slots.index_select(0, slots)
            log_total = torch.logaddexp(before, here)
            out *= (before - log_total).exp_()
            out.addcmul_(in_slots.index_select(0, slots), (here - log_total).exp_())
        is_alone = log_total <= floor
        out = torch.where(is_alone, v[:-1], out)
        ctx.causal = causal
        ctx.save_for_backward(q, k, v, out, log_total, is_alone, *layout)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (dout,) = grad_outputs
        # Only once: activation checkpointing rejects a second access.
        q, k, v, out, log_total, is_alone, *layout = ctx.saved_tensors
        rounds = RoundLayout(*layout)
        gradients = [torch.zeros_like(x[:-1]) for x in (q, k, v)]
        gradients[2] += torch.where(is_alone, dout, 0)
        with no_autocast(out):
            of_rows = (log_total, dout, (dout * out).sum(dim=-1, keepdim=True))
            rows = [q, k, v, *(F.pad(x, (0, 0, 0, 1)) for x in of_rows)]
            in_slots = [x.new_zeros(rounds.num_slots, x.shape[-1]) for x in (q, k, v)]
            for index, slots in enumerate(rounds.slots):
                for tile in tiles(rounds, index, causal=ctx.causal, width=v.shape[-1]):
                    _write_gradients(in_slots, tile, rows)
                for gradient, x in zip(gradients, in_slots, strict=True):
                    gradient.add_(x.index_select(0, slots))
        dq, dk, dv = (F.pad(gradient, (0, 0, 0, 1)) for gradient in gradients)
        return dq, dk, dv, None, None, None, None


def _write_gradients(in_slots: list[Tensor], tile: ChunkTile, rows: list[Tensor]) -> None:
    """Writes the gradients of queries, keys and values in the slots of a tile.

    Those of keys and values are complete when the next tile has added the part of its first chunk.
    `rows` are queries, keys, values, logarithms of totals, the gradient of the output, and its mean
    product with the values, all (N + 1, width), the last row 0.
    """
    q, k, v, log_total, dout, mean = rows
    dq, dk, dv = in_slots
    q_SMK, dout_SMC = tile.own(q), tile.own(dout)
    weights_SML = tile.logits(q, k).sub_(tile.own(log_total)).exp_()
    weights_SML.masked_fill_(tile.hidden_SML, 0)
    dlogits_SML = (dout_SMC @ tile.seen(v).mT).sub_(tile.own(mean)).mul_(weights_SML)
    dq[tile.slots] = (dlogits_SML @ tile.seen(k)).flatten(0, 1)
    before = slice(tile.slots.start - tile.size, tile.slots.stop - tile.size)
    for gradient, by_key in ((dk, dlogits_SML.mT @ q_SMK), (dv, weights_SML.mT @ dout_SMC)):
        gradient[tile.slots] = by_key[:, tile.size :].flatten(0, 1)
        gradient[before] += by_key[:, : tile.size].flatten(0, 1)
