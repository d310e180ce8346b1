"""Long-short attention: a window and summaries of distant positions (arXiv 2107.02192)."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.attention.base import Attention, Context, Recurrent, StateParts
from protlm.attention.ops.blocks import from_blocks, softmax_in_blocks, to_blocks, with_margins
from protlm.attention.ops.key_value_cache import KeyValueCache
from protlm.attention.ops.numerics import (
    at_once,
    no_autocast,
    upcast,
    visible_softmax,
    zero_padding,
)
from protlm.attention.ops.sums import SoftmaxSums
from protlm.config.fields import at_least

# Past summaries are copied to every block of queries: smaller blocks would copy too much.
_LEAST_BLOCK = 64


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


# Elements of the copies of keys and values on a CPU: few enough for its caches, and for the memory
# that the C library reuses, since it requests every tensor of more than 32 MiB from the system.
_CPU_NUMBERS = 1 << 20

# Keys or values of the summaries of every chunk, BHSPK, and of the positions, BHLK.
_FarAndNear = tuple[Tensor, Tensor]


@final
@dataclass(frozen=True)
class LongShortState(StateParts):
    """The window and, in slots after it, the summaries; and the sums of the current chunk."""

    seen: KeyValueCache
    current: SoftmaxSums


@final
class LongShort(Attention, Recurrent[LongShortState]):
    """One softmax over the residues nearby and a few learned summaries of all others.

    out_i = softmax(q_i [K̄ | K_i]ᵀ / √K) [V̄ | V_i] with the keys and values K_i, V_i near position
    i and compressed ones K̄ = Pᵀ K, V̄ = Pᵀ V. The r = `rank` columns of P are a softmax over
    positions of x W_p, where x is the block's input and each head has its own W_p (sections 3.2 and
    3.3). A position may be seen twice, directly and in summaries. DualLN (section 3.4): K_i and V_i
    pass one LayerNorm, K̄ and V̄ another, each over all heads together; values are as wide as keys.

    Bidirectional: near positions are those of the query's own segment of w = `window` and of half a
    segment on each side (if w is odd, one position more after it than before it), and P is a
    softmax over the whole sequence. Causal: near positions are the query's own and the w - 1 before
    it, every chunk of l = `chunk` positions has its own P and r summaries, and position i sees the
    summaries of earlier chunks. The part of its own chunk before its window is not visible: a
    window of at least one chunk leaves no such gap.

    Segments, windows and chunks consist of positions in the tensor; padding in them has no weight,
    and a chunk of padding has no summary. Decoding keeps one window, the summaries within `memory`
    and the sums of the current chunk.

    Deviations from the paper:

    - `memory`, rounded up to chunks, bounds how far back summaries are seen. The paper's history is
      a cache of the same number of positions. Without a bound the causal form costs L² r / l, and
      the state that decoding keeps grows by r keys and values for every l positions.
    - There are no relative positions of Transformer-XL, because the model provides positions.
      Rotary positions are applied to keys before they are summarized.
    - Compressed keys and values are normalized once, LN(Pᵀ K), as in the paper and the released
      autoregressive code. The released bidirectional code also normalizes them before.
    - W_p has no bias, which the softmax over positions would cancel.
    - The released code has an optional convolution of the values and a separate branch for a `cls`
      token; neither is implemented.
    - Attention weights have no dropout.
    """

    matrices = ("projection",)
    is_linear: ClassVar[bool] = False
    cost: ClassVar[str] = (
        "L ((2 window + rank) K + rank D); causal L ((window + rank memory / chunk) K + rank D)"
    )
    advice: ClassVar[str] = "long proteins: exact nearby, learned summaries of distant positions"
    map_meaning: ClassVar[str] = (
        "the weight of value j in output i, in the window and through the summaries; values are "
        "normalized first, so that the output is not the map times the values"
    )

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        window: Annotated[int, at_least(1)] = 128,
        rank: Annotated[int, at_least(0)] = 16,
        chunk: Annotated[int, at_least(1)] = 128,
        memory: Annotated[int | None, at_least(1)] = 2048,
        dual_norm: bool = True,
    ) -> None:
        super().__init__()
        self.window, self.rank, self.chunk, self.memory = window, rank, chunk, memory
        self.near_norm = nn.LayerNorm(num_heads * head_dim) if dual_norm else None
        self.far_norm = nn.LayerNorm(num_heads * head_dim) if dual_norm and rank else None
        # Uniform, like a linear layer in the released code.
        bound = model_dim**-0.5
        weight = torch.empty(model_dim, num_heads * rank).uniform_(-bound, bound)
        self.projection = nn.Parameter(weight) if rank else None
        self._num_heads = num_heads
        # Chunks whose summaries decoding keeps; None for all.
        self._most_groups = None if memory is None else -(-memory // chunk)

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        hidden_BLD, mask_BL, causal = context[:3]
        pattern = self._pattern(q_BHLK.shape[2], causal=causal)
        with no_autocast(v_BHLC):
            weights_BHSMP = self._summary_weights(hidden_BLD, mask_BL, pattern)
            k, v = (
                self._far_and_near(zero_padding(x, mask_BL), weights_BHSMP)
                for x in (k_BHLK, v_BHLC)
            )
            visible = pattern.visible_in_blocks(mask_BL, self.rank)
            # On a GPU the keys of all heads are copied to blocks together.
            heads = at_once(q_BHLK, q_BHLK[:, 0].numel(), cpu=_CPU_NUMBERS, gpu=q_BHLK.numel())
            parts = zip(*(x.split(heads, dim=1) for x in (q_BHLK, *k, *v)), strict=True)
            outs = []
            for q, far_k, near_k, far_v, near_v in parts:
                queries = zero_padding(q, mask_BL).to(v_BHLC.dtype)
                out = _attend(queries, (far_k, near_k), (far_v, near_v), visible, pattern)
                outs.append(zero_padding(out, mask_BL))
            return torch.cat(outs, dim=1)

    @torch.no_grad()
    def map_rows(self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, rows: slice) -> Tensor:
        """The weight of a summary is distributed over its positions in proportion to P."""
        hidden_BLD, mask_BL, causal = context[:3]
        pattern = self._pattern(q_BHLK.shape[2], causal=causal)
        with no_autocast(q_BHLK):
            weights_BHSMP = self._summary_weights(hidden_BLD, mask_BL, pattern)
            far, near = self._far_and_near(zero_padding(k_BHLK, mask_BL), weights_BHSMP)
            keys = torch.cat([far.flatten(2, 3), near], dim=2)
            logits = upcast(zero_padding(q_BHLK, mask_BL)[:, :, rows]) @ keys.mT
            visible = pattern.visible_in_rows(mask_BL, rows, self.rank)
            fractions = visible_softmax(logits / math.sqrt(q_BHLK.shape[-1]), visible)
            near_weights = fractions[..., -pattern.length :]
            far_weights = fractions[..., : -pattern.length].unflatten(-1, far.shape[2:4])
            through = torch.einsum("bhisp,bhsjp->bhisj", far_weights, weights_BHSMP)
            return near_weights + through.flatten(3)[..., : pattern.length]

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> LongShortState:
        slots = self.window + self.rank * (self._most_groups or 1)
        seen = KeyValueCache.empty(k_BHK.to(v_BHC.dtype), v_BHC, slots)
        values = torch.cat([upcast(k_BHK), upcast(v_BHC)], dim=-1)[:, :, None]
        values = values.expand(-1, -1, self.rank, -1)
        return LongShortState(seen, SoftmaxSums.none(values[..., :1], values))

    @torch.no_grad()
    def step(
        self,
        state: LongShortState,
        q_BHK: Tensor,
        k_BHK: Tensor,
        v_BHC: Tensor,
        context: Context,
    ) -> tuple[LongShortState, Tensor]:
        with no_autocast(v_BHC):
            k, v = upcast(k_BHK), upcast(v_BHC)
            near = (_normalized(x, self.near_norm) for x in (k, v))
            seen = state.seen.append(*near, slot=state.seen.length % self.window)
            out_BHC = seen.attend(q_BHK, self._visible_slots(seen)).to(v_BHC.dtype)
            if self.rank == 0:
                return LongShortState(seen, state.current), out_BHC
            scores_BHP1 = self._scores(context.hidden_BLD[:, 0])[..., None]
            values = torch.cat([k, v], dim=-1)[:, :, None].expand(-1, -1, self.rank, -1)
            current = state.current.plus(
                SoftmaxSums(scores_BHP1, values, torch.ones_like(scores_BHP1))
            )
            if seen.length % self.chunk == 0:
                far = current.mean().split([k.shape[-1], v.shape[-1]], dim=-1)
                group = seen.length // self.chunk - 1
                if self._most_groups is not None:
                    group %= self._most_groups
                summary = (_normalized(x, self.far_norm) for x in far)
                slots = group * self.rank
                seen = seen.put(*summary, slot=self.window + slots, room=slots)
                current = SoftmaxSums.none(scores_BHP1, values)
            return LongShortState(seen, current), out_BHC

    def _visible_slots(self, seen: KeyValueCache) -> Tensor:
        """Returns which slots the last position sees, M: its window, and the summaries so far."""
        groups = (seen.length - 1) // self.chunk
        if self._most_groups is not None:
            groups = min(groups, self._most_groups)
        slot_M = torch.arange(seen.slots, device=seen.k_BHMK.device)
        in_window_M = slot_M < min(seen.length, self.window)
        in_groups_M = (slot_M >= self.window) & (slot_M < self.window + groups * self.rank)
        return in_window_M | in_groups_M

    def _pattern(self, length: int, *, causal: bool) -> Pattern:
        if causal:
            return Pattern.history(length, self.window, self.chunk, self.memory)
        return Pattern.segments(length, self.window)

    def _summary_weights(self, hidden_BLD: Tensor, mask_BL: Tensor, pattern: Pattern) -> Tensor:
        """Computes the weights of positions in the P summaries of their chunk, BHSMP: a softmax.

        Padding has zero weight; an all-padding chunk is weighted uniformly.
        """
        scores = self._scores(hidden_BLD.masked_fill(~mask_BL[..., None], 0)).transpose(1, 2)
        floor = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask_BL[:, None, :, None], floor)
        return to_blocks(scores, pattern.chunk, value=floor).softmax(dim=3)

    def _scores(self, hidden: Tensor) -> Tensor:
        """Computes x W_p, (..., H, P), in float32 or float64."""
        hidden = upcast(hidden)
        if self.projection is None:
            return hidden.new_zeros(*hidden.shape[:-1], self._num_heads, 0)
        scores = hidden @ self.projection.to(hidden.dtype)
        return scores.unflatten(-1, (self._num_heads, self.rank))

    def _far_and_near(self, x_BHLK: Tensor, weights_BHSMP: Tensor) -> _FarAndNear:
        """Returns keys or values of summaries, BHSPK, and positions, BHLK, each normalized.

        Summaries are means of the positions of a chunk; those are 0 at padding.
        """
        x_BHLK = upcast(x_BHLK)
        far_BHSPK = weights_BHSMP.to(x_BHLK.dtype).mT @ to_blocks(x_BHLK, weights_BHSMP.shape[3])
        return _normalized(far_BHSPK, self.far_norm), _normalized(x_BHLK, self.near_norm)


def _attend(
    q_BHLK: Tensor, k: _FarAndNear, v: _FarAndNear, visible: Tensor, pattern: Pattern
) -> Tensor:
    """Computes one softmax over summaries and positions, BHLK, in the dtype of the queries."""
    q_BHSMK = to_blocks(q_BHLK, pattern.block)
    keys, values = (_beside_blocks(*x, pattern).to(q_BHLK.dtype) for x in (k, v))
    return from_blocks(softmax_in_blocks(q_BHSMK, keys, values, visible), pattern.length)


def _normalized(x: Tensor, norm: nn.LayerNorm | None) -> Tensor:
    """Applies layer normalization over all heads (axis 1) and their channels (the last axis)."""
    if norm is None:
        return x
    heads_last = x.movedim(1, -2)
    weight, bias = norm.weight.to(x.dtype), norm.bias.to(x.dtype)
    joined = F.layer_norm(heads_last.flatten(-2), norm.normalized_shape, weight, bias, norm.eps)
    return joined.view_as(heads_last).movedim(-2, 1)


def _beside_blocks(far_BHSPK: Tensor, near_BHLK: Tensor, pattern: Pattern) -> Tensor:
    """Returns the keys or values of every block of queries: summaries, then positions."""
    far = pattern.far_in_blocks(far_BHSPK.flatten(3)).unflatten(-1, far_BHSPK.shape[3:])
    near = pattern.near_in_blocks(near_BHLK)
    # Heads come after blocks in memory, the layout of the fused kernels.
    return torch.cat([x.transpose(1, 2) for x in (far.flatten(3, 4), near)], dim=3).transpose(1, 2)
