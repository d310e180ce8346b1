"""Reformer: attention within the buckets of a hash (Kitaev et al., arXiv 2001.04451)."""

from typing import Annotated, Any, ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.base import Attention, Context, RandomFeatures
from protlm.attention.ops.lsh import Layout, Tile, draw_rotations, hash_buckets, lay_out, tiles
from protlm.attention.ops.numerics import accum_dtype, no_autocast, zero_padding
from protlm.config.fields import Range, at_least

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
        _, mask_BL, causal = context
        dtype = torch.promote_types(accum_dtype(q_BHLK), accum_dtype(v_BHLC))
        # The positions of all samples and heads, followed by a row of zeros for empty slots.
        q, v = (
            F.pad(zero_padding(x, mask_BL).to(dtype).flatten(0, 2), (0, 0, 0, 1))
            for x in (q_BHLK, v_BHLC)
        )
        with no_autocast(q_BHLK):
            k = q * (q.square().sum(dim=-1, keepdim=True) + _EPSILON).rsqrt()
            layout = self._layout(q_BHLK, mask_BL)
            out = _ChunkedSoftmax.apply(q, k, v, causal, *layout)
        assert isinstance(out, Tensor)
        return out.view(v_BHLC.shape).to(v_BHLC.dtype)

    def _layout(self, q_BHLK: Tensor, mask_BL: Tensor) -> Layout:
        """Lays out the chunks of all samples and heads, each with its own buckets."""
        batch, heads, length, _ = q_BHLK.shape
        buckets_TBHL = hash_buckets(q_BHLK, self.rotations, self.num_buckets)
        rows_BH = torch.arange(batch * heads, device=q_BHLK.device).view(batch, heads)
        buckets_TBHL = buckets_TBHL + self.num_buckets * rows_BH[..., None]
        num_buckets = self.num_buckets * batch * heads
        buckets_TBHL = buckets_TBHL.masked_fill(~mask_BL[:, None], num_buckets)
        # One chunk of L positions contains the same as a longer one.
        size = min(self.chunk, length)
        return lay_out(buckets_TBHL.flatten(1), num_buckets=num_buckets, size=size)


class _ChunkedSoftmax(torch.autograd.Function):
    """Softmax over the chunks: `apply(q, k, v, causal, *layout)` returns N positions, (N, C).

    Queries, keys and values are (N + 1, width), the last row 0. Weights exist for one tile of
    chunks at a time. Because all rounds are one softmax, its gradient needs only the logarithm of
    the total: weights are recomputed from it, and no result of a single round is stored.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, *layout: Tensor) -> Tensor:
        rounds = Layout(*layout)
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
        rounds = Layout(*layout)
        gradients = [torch.zeros_like(x[:-1]) for x in (q, k, v)]
        gradients[2] += torch.where(is_alone, dout, 0)
        with no_autocast(out):
            of_rows = (log_total, dout, (dout * out).sum(dim=-1, keepdim=True))
            rows = _Rows(q, k, v, *(F.pad(x, (0, 0, 0, 1)) for x in of_rows))
            in_slots = [x.new_zeros(rounds.num_slots, x.shape[-1]) for x in (q, k, v)]
            for index, slots in enumerate(rounds.slots):
                for tile in tiles(rounds, index, causal=ctx.causal, width=v.shape[-1]):
                    _write_gradients(in_slots, tile, rows)
                for gradient, x in zip(gradients, in_slots, strict=True):
                    gradient.add_(x.index_select(0, slots))
        dq, dk, dv = (F.pad(gradient, (0, 0, 0, 1)) for gradient in gradients)
        return dq, dk, dv, None, None, None, None


class _Rows(NamedTuple):
    """The tensors that the gradient needs, by position: (N + 1, width), the last row 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_total: Tensor
    dout: Tensor
    # The mean of dout·v_j with the weights of the row.
    mean: Tensor


def _write_gradients(in_slots: list[Tensor], tile: Tile, rows: _Rows) -> None:
    """Writes the gradients of queries, keys and values in the slots of a tile.

    Those of keys and values are complete when the next tile has added the part of its first chunk.
    """
    dq, dk, dv = in_slots
    q_SMK, dout_SMC = tile.own(rows.q), tile.own(rows.dout)
    weights_SML = tile.logits(rows.q, rows.k).sub_(tile.own(rows.log_total)).exp_()
    weights_SML.masked_fill_(tile.hidden_SML, 0)
    dlogits_SML = (dout_SMC @ tile.seen(rows.v).mT).sub_(tile.own(rows.mean)).mul_(weights_SML)
    dq[tile.slots] = (dlogits_SML @ tile.seen(rows.k)).flatten(0, 1)
    for gradient, by_key in ((dk, dlogits_SML.mT @ q_SMK), (dv, weights_SML.mT @ dout_SMC)):
        gradient[tile.slots] = by_key[:, tile.size :].flatten(0, 1)
        gradient[tile.slots_before] += by_key[:, : tile.size].flatten(0, 1)
