"""Attention within the buckets of a hash: the Reformer (Kitaev et al., arXiv 2001.04451)."""

from typing import Any, ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.base import Attention, RandomFeatures
from protlm.attention.hashing import Layout, Tile, draw_rotations, hash_buckets, lay_out, tiles
from protlm.attention.masking import zero_padding
from protlm.attention.precision import full_precision, wide_dtype
from protlm.errors import UserError

# Added to |q|², so that a query of 0 has a gradient.
_EPSILON = 1e-12


@final
class Reformer(Attention, RandomFeatures):
    """Exact softmax over the positions that random hashes put together; keys are the queries.

    In every round the hash h(x) = argmax [x R; -x R] sorts positions into buckets; a bucket's
    positions, in their order, are cut into chunks, and a position sees those in its own chunk and
    in the chunk before it in the bucket, and never those in the next one, even where the future is
    visible. With P_i what position i sees in any round, itself left out, and k_j = q_j / |q_j|
    (section 2, eqs. 2-6):

        o_i = Σ_{j ∈ P_i} exp(q_i·k_j - z_i) v_j,   z_i = log Σ_{j ∈ P_i} exp(q_i·k_j)

    and o_i = v_i where P_i is empty: a position sees itself only as a last resort. Rounds are
    combined by their logsumexp, and a pair that several rounds have in common counts in the first
    of them; the paper counts 1/N of it in each of the N, with the same sum (appendix A). Keys that
    are passed are not read. Queries that are 0 get a key of 0: |q| is √(|q|² + 1e-12).

    Deviations from the paper. There chunks are cut from all sorted positions, so a chunk's edges
    move with the buckets of positions still to come, and what the past sees tells of the future;
    here chunks are counted from the start of each bucket, by position. The paper's eq. 1 divides
    by √K, while the released code does so with keys of norm √K: these are its logits. Rotations
    are drawn once, or every `redraw_every` steps, and not for every batch. A position's own weight
    as a last resort is exact, not a logit of -1e5.

    Args:
        num_heads: heads H; each has its own rotations.
        head_dim: width K of a query.
        max_length: the longest input, which the default number of buckets is for; longer ones
            work, with fuller buckets.
        chunk: positions in a chunk.
        num_hashes: rounds T of hashing; more find more of the large weights.
        num_buckets: buckets of a round, 1 or an even number, the same for all inputs; None for one
            for each `chunk` positions of the longest input, whose hashes then take time in
            proportion to L · max_length / chunk. Inputs much shorter than `max_length` meet few
            other positions in so many buckets, and each may leave most of a chunk empty: set it to
            their length over `chunk`.
        redraw_every: optimiser steps between two draws of the rotations; None keeps the first.
        seed: what the rotations are drawn from, together with the redraw index.

    Raises:
        UserError: a count below 1, or an odd number of buckets.
    """

    supports_bidirectional = True
    supports_causal = True
    shares_query_key: ClassVar[bool] = True
    cost: ClassVar[str] = "num_hashes L (chunk + num_buckets) K"
    advice: ClassVar[str] = (
        "thousands of positions of which few matter to each; num_buckets for the usual length"
    )
    rotations: Tensor

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_length: int,
        chunk: int = 64,
        num_hashes: int = 4,
        num_buckets: int | None = None,
        redraw_every: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_at_least_1("chunk", chunk, example=64)
        _check_at_least_1("num_hashes", num_hashes, example=4)
        if num_buckets is None:
            # In one bucket nothing is lost to hashing: that is for inputs of one chunk.
            num_buckets = 1 if max_length <= chunk else 2 * max(max_length // (2 * chunk), 1)
        _check_num_buckets(num_buckets)
        if redraw_every is not None:
            _check_at_least_1("redraw_every", redraw_every, example=1000)
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
        """Draws the rotations number `index`, a pure function of (seed, index), in place."""
        self.rotations.copy_(draw_rotations(self._seed, index, **self._sizes))

    def forward(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        *,
        hidden_BLD: Tensor,
        mask_BL: Tensor,
        causal: bool,
    ) -> Tensor:
        """See `Attention.forward`; keys are made of the queries."""
        dtype = torch.promote_types(wide_dtype(q_BHLK), wide_dtype(v_BHLC))
        # All samples' and heads' positions in one line, with a row of zeros for empty slots.
        q, v = (
            F.pad(zero_padding(x, mask_BL).to(dtype).flatten(0, 2), (0, 0, 0, 1))
            for x in (q_BHLK, v_BHLC)
        )
        with full_precision(q_BHLK):
            k = q * (q.square().sum(dim=-1, keepdim=True) + _EPSILON).rsqrt()
            layout = self._layout(q_BHLK, mask_BL)
            out = _ChunkedSoftmax.apply(q, k, v, causal, *layout)
        assert isinstance(out, Tensor)
        return out.view(v_BHLC.shape).to(v_BHLC.dtype)

    def _layout(self, q_BHLK: Tensor, mask_BL: Tensor) -> Layout:
        """The chunks of all samples and heads, whose buckets are apart from each other's."""
        batch, heads, length, _ = q_BHLK.shape
        buckets_TBHL = hash_buckets(q_BHLK, self.rotations, self.num_buckets)
        rows_BH = torch.arange(batch * heads, device=q_BHLK.device).view(batch, heads)
        buckets_TBHL = buckets_TBHL + self.num_buckets * rows_BH[..., None]
        num_buckets = self.num_buckets * batch * heads
        buckets_TBHL = buckets_TBHL.masked_fill(~mask_BL[:, None], num_buckets)
        # With one chunk for all, a shorter one holds the same.
        size = min(self.chunk, length)
        return lay_out(buckets_TBHL.flatten(1), num_buckets=num_buckets, size=size)


class _ChunkedSoftmax(torch.autograd.Function):
    """`apply(q, k, v, causal, *layout)` returns the output of N positions, (N, C).

    Queries, keys and values are (N + 1, width), the last row 0. Weights exist for a tile of chunks
    at a time. As all rounds are one softmax, its gradient needs only the logarithm of the total:
    weights are computed again from it, and no round's own result is kept.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, *layout: Tensor) -> Tensor:
        """Adds one round after the other to a running softmax."""
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
                # The largest weight is exp(top - log total). This spares a second exponential.
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
        """Walks the same tiles, with the weights that positions have in all rounds together."""
        (dout,) = grad_outputs
        # Once only: activation checkpointing refuses a second look.
        q, k, v, out, log_total, is_alone, *layout = ctx.saved_tensors
        rounds = Layout(*layout)
        gradients = [torch.zeros_like(x[:-1]) for x in (q, k, v)]
        gradients[2] += torch.where(is_alone, dout, 0)
        with full_precision(out):
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
    """What the gradient needs of each position: (N + 1, width), the last row 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_total: Tensor
    dout: Tensor
    # The mean of dout·v_j under the weights of the row.
    mean: Tensor


def _write_gradients(in_slots: list[Tensor], tile: Tile, rows: _Rows) -> None:
    """Writes the gradients of queries, keys and values in the slots of a tile.

    Those of keys and values are complete when the next tile has added what its first chunk saw.
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


def _check_at_least_1(option: str, value: int, *, example: int) -> None:
    if value < 1:
        raise UserError(
            f"attention.{option}={value} must be at least 1; type attention.{option}={example}"
        )


def _check_num_buckets(num_buckets: int) -> None:
    if num_buckets != 1 and (num_buckets < 1 or num_buckets % 2):
        raise UserError(
            f"attention.num_buckets={num_buckets} must be 1 or an even number, as each rotation "
            "makes two; type attention.num_buckets=16, or null for one per chunk of the longest "
            "input"
        )
