"""Long-short attention: a window, and a summary of what is far (Zhu et al., arXiv 2107.02192)."""

import math
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.attention.base import Attention
from protlm.attention.blocks import from_blocks, softmax_in_blocks, to_blocks
from protlm.attention.compression import (
    History,
    Pattern,
    Segments,
    summaries,
    summary_weights,
)
from protlm.attention.masking import zero_padding
from protlm.attention.precision import full_precision, wide
from protlm.errors import UserError

# Copies of keys and values stay small enough on a CPU for its caches, and for memory that the C
# library keeps: it asks the system anew for every tensor of more than 32 MiB.
_CPU_NUMBERS = 1 << 20

# Keys or values of the summaries of every chunk, BHSPK, and of the positions, BHLK.
_FarAndNear = tuple[Tensor, Tensor]


@final
class LongShort(Attention):
    """One softmax over the residues nearby and a few learned summaries of all others.

    out_i = softmax(q_i [K̄ | K_i]ᵀ / √K) [V̄ | V_i] with the keys and values K_i, V_i near position
    i and compressed ones K̄ = Pᵀ K, V̄ = Pᵀ V. The r columns of P are a softmax over positions of
    x W_p, with x the block's input and a W_p for each head (sections 3.2 and 3.3). A position may
    be seen twice, as it is and in summaries. DualLN (section 3.4): K_i and V_i pass one LayerNorm,
    K̄ and V̄ another, each over all heads together; values are as wide as keys.

    Bidirectional: near is the position's own segment of w and half a segment on each side, and P
    is a softmax over the whole sequence. Causal: near are the position itself and the w - 1 before
    it, every chunk of l positions has a P and r summaries of its own, and position i sees those of
    chunks before its own. It does not see what its own chunk has before its window: a window of a
    chunk or more leaves no such gap.

    Segments, windows and chunks are of positions in the tensor; padding in them has no weight, and
    a chunk of padding alone no summary. Deviations from the paper:

    - `memory` bounds how far back summaries are seen. The paper's history is a cache of as many
      positions, and without a bound the causal form costs L² r / l.
    - No relative positions of Transformer-XL: positions are the model's matter. Rotary ones are
      those of the keys that are summarised.
    - Compressed keys and values are normalised once, LN(Pᵀ K), as in the paper and the released
      autoregressive code. The released bidirectional code normalises them before too.
    - W_p has no bias, which the softmax over positions would cancel.

    Args:
        num_heads: heads.
        head_dim: width K of a query and a key, and C of a value.
        model_dim: width D of the block's input.
        window: positions w of a segment and, causal, of a window; if odd, a segment sees one
            position more after it than before.
        rank: summaries r of a head, of the sequence or, causal, of every chunk; 0 for none.
        chunk: positions l of a chunk; for the causal form.
        memory: positions before its own chunk whose summaries a query sees, rounded up to
            chunks; None for all. For the causal form.
        dual_norm: whether keys and values pass the two LayerNorms; without them the mechanism is
            linear in the values.

    Raises:
        UserError: a window, chunk or memory below 1, or a rank below 0.
    """

    supports_bidirectional = True
    supports_causal = True
    matrices = ("projection",)
    cost: ClassVar[str] = "L (2 window + rank) K; causal L (window + rank memory / chunk) K"
    advice: ClassVar[str] = "long proteins: exact nearby, a learned summary of what is far"
    map_meaning: ClassVar[str] = (
        "the weight of value j in output i, in the window and through the summaries; values are "
        "normalised first, so that the output is not the map times the values"
    )

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        window: int = 128,
        rank: int = 16,
        chunk: int = 128,
        memory: int | None = 2048,
        dual_norm: bool = True,
    ) -> None:
        super().__init__()
        _refuse_less("window", window, least=1, example=128)
        _refuse_less("rank", rank, least=0, example=16)
        _refuse_less("chunk", chunk, least=1, example=128)
        _refuse_less("memory", memory, least=1, example=2048)
        self.window, self.rank, self.chunk, self.memory = window, rank, chunk, memory
        self.near_norm = nn.LayerNorm(num_heads * head_dim) if dual_norm else None
        self.far_norm = nn.LayerNorm(num_heads * head_dim) if dual_norm and rank else None
        # As many columns as heads times ranks, uniform as a linear layer's in the released code.
        bound = model_dim**-0.5
        weight = torch.empty(model_dim, num_heads * rank).uniform_(-bound, bound)
        self.projection = nn.Parameter(weight) if rank else None
        self._num_heads = num_heads

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
        """See `Attention.forward`."""
        pattern = self._pattern(q_BHLK.shape[2], causal=causal)
        with full_precision(v_BHLC):
            weights_BHSMP = self._summary_weights(hidden_BLD, mask_BL, pattern)
            k, v = (
                self._far_and_near(zero_padding(x, mask_BL), weights_BHSMP)
                for x in (k_BHLK, v_BHLC)
            )
            visible = pattern.visible_in_blocks(mask_BL, self.rank)
            heads = _heads_at_once(q_BHLK)
            parts = zip(*(x.split(heads, dim=1) for x in (q_BHLK, *k, *v)), strict=True)
            outs = []
            for q, far_k, near_k, far_v, near_v in parts:
                queries = zero_padding(q, mask_BL).to(v_BHLC.dtype)
                out = _attend(queries, (far_k, near_k), (far_v, near_v), visible, pattern)
                outs.append(zero_padding(out, mask_BL))
            return torch.cat(outs, dim=1)

    @torch.no_grad()
    def attention_map(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        *,
        hidden_BLD: Tensor,
        mask_BL: Tensor,
        causal: bool,
        rows: slice | None = None,
    ) -> Tensor:
        """The map or a block of its rows, in float32 (float64 for float64 queries).

        The weight of a summary is shared out among its positions as P has it.
        """
        rows = slice(None) if rows is None else rows
        pattern = self._pattern(q_BHLK.shape[2], causal=causal)
        with full_precision(q_BHLK):
            weights_BHSMP = self._summary_weights(hidden_BLD, mask_BL, pattern)
            far, near = self._far_and_near(zero_padding(k_BHLK, mask_BL), weights_BHSMP)
            keys = torch.cat([far.flatten(2, 3), near], dim=2)
            logits = wide(zero_padding(q_BHLK, mask_BL)[:, :, rows]) @ keys.mT
            visible = pattern.visible_in_rows(mask_BL, rows, self.rank)
            # A finite floor, so that a row that sees nothing is 0 below and not NaN.
            floor = torch.finfo(logits.dtype).min
            logits = (logits / math.sqrt(q_BHLK.shape[-1])).masked_fill(~visible, floor)
            shares = logits.softmax(dim=-1).masked_fill(~visible, 0)
            near_shares = shares[..., -pattern.length :]
            far_shares = shares[..., : -pattern.length].unflatten(-1, far.shape[2:4])
            through = torch.einsum("bhisp,bhsjp->bhisj", far_shares, weights_BHSMP)
            return near_shares + through.flatten(3)[..., : pattern.length]

    def _pattern(self, length: int, *, causal: bool) -> Pattern:
        if causal:
            return History(length, self.window, self.chunk, self.memory)
        return Segments(length, self.window)

    def _summary_weights(self, hidden_BLD: Tensor, mask_BL: Tensor, pattern: Pattern) -> Tensor:
        """P of every head and chunk, BHSMP."""
        hidden_BLD = wide(hidden_BLD.masked_fill(~mask_BL[..., None], 0))
        if self.projection is None:
            scores = hidden_BLD.new_zeros(*mask_BL.shape, self._num_heads, 0)
        else:
            scores = hidden_BLD @ self.projection.to(hidden_BLD.dtype)
            scores = scores.unflatten(-1, (self._num_heads, self.rank))
        return summary_weights(scores.transpose(1, 2), mask_BL, pattern.chunk)

    def _far_and_near(self, x_BHLK: Tensor, weights_BHSMP: Tensor) -> _FarAndNear:
        """Keys or values of the summaries, BHSPK, and of the positions, BHLK, each normalised."""
        x_BHLK = wide(x_BHLK)
        far_BHSPK = summaries(x_BHLK, weights_BHSMP.to(x_BHLK.dtype))
        return _normalised(far_BHSPK, self.far_norm), _normalised(x_BHLK, self.near_norm)


def _attend(
    q_BHLK: Tensor, k: _FarAndNear, v: _FarAndNear, visible: Tensor, pattern: Pattern
) -> Tensor:
    """One softmax over summaries and positions, BHLK, in the dtype of the queries."""
    q_BHSMK = to_blocks(q_BHLK, pattern.block)
    keys, values = (_beside_blocks(*x, pattern).to(q_BHLK.dtype) for x in (k, v))
    return from_blocks(softmax_in_blocks(q_BHSMK, keys, values, visible), pattern.length)


def _normalised(x: Tensor, norm: nn.LayerNorm | None) -> Tensor:
    """Layer normalisation over all heads, axis 1, and their channels, the last one, together."""
    if norm is None:
        return x
    heads_last = x.movedim(1, -2)
    weight, bias = norm.weight.to(x.dtype), norm.bias.to(x.dtype)
    joined = F.layer_norm(heads_last.flatten(-2), norm.normalized_shape, weight, bias, norm.eps)
    return joined.view_as(heads_last).movedim(-2, 1)


def _beside_blocks(far_BHSPK: Tensor, near_BHLK: Tensor, pattern: Pattern) -> Tensor:
    """Keys or values that stand beside every block of queries: summaries, then positions."""
    far = pattern.far_in_blocks(far_BHSPK.flatten(3)).unflatten(-1, far_BHSPK.shape[3:])
    near = pattern.near_in_blocks(near_BHLK)
    # Heads come after blocks in memory, as the fused kernels take them.
    return torch.cat([x.transpose(1, 2) for x in (far.flatten(3, 4), near)], dim=3).transpose(1, 2)


def _heads_at_once(q_BHLK: Tensor) -> int:
    """How many heads' keys are copied to blocks at a time; all of them on a GPU."""
    batch, heads, length, width = q_BHLK.shape
    if q_BHLK.device.type != "cpu":
        return heads
    return max(_CPU_NUMBERS // (batch * length * width), 1)


def _refuse_less(option: str, value: int | None, *, least: int, example: int) -> None:
    if value is not None and value < least:
        raise UserError(
            f"attention.{option}={value} must be at least {least}; "
            f"type attention.{option}={example}"
        )
