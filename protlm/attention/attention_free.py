"""What the attention-free transformers share: gate, masks, maps and windows of biases."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.attention.base import Attention, Context, QueryKeyNorms, Recurrent, StateParts
from protlm.attention.ops.blocks import from_blocks, to_blocks, with_margins
from protlm.attention.ops.key_value_cache import KeyValueCache
from protlm.attention.ops.numerics import (
    at_once,
    no_autocast,
    recomputed,
    upcast,
    visible_keys,
    zero_padding,
)
from protlm.attention.ops.sums import SoftmaxSums, floor_of, triangle

# (heads, exponents, values) -> means without the gate; the tensors are (B, H, L, channels).
Mixer = Callable[[slice, Tensor, Tensor], Tensor]

# Elements of the values of heads that are computed together; on a CPU they fit into its cache.
_CPU_NUMBERS, _GPU_NUMBERS = 1 << 18, 1 << 28


class AttentionFree(Attention):
    """Base of mechanisms Y_i = σ(q_i) ⊙ Σ_j e^(x_j + w_ij) v_j / Σ_j e^(x_j + w_ij), x = k.

    Rotary positions are not applied: they are meant for products of queries and keys, and there are
    none here. With rotated keys the weight e^x would depend on the absolute position, up to
    15-fold.
    """

    qk_norm = QueryKeyNorms.none
    takes_rotary: ClassVar[bool] = False
    map_meaning: ClassVar[str] = (
        "the weight of value j in output i before the gate, mean over the head's channels"
    )

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        assert v_BHLC.shape[-1] == q_BHLK.shape[-1], "a query gates the channels of a value"
        with no_autocast(v_BHLC):
            return self._outputs(q_BHLK, k_BHLK, v_BHLC, context.mask_BL, causal=context.causal)

    @torch.no_grad()
    def map_rows(self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, rows: slice) -> Tensor:
        mask_BL, causal = context.mask_BL, context.causal
        hidden_B1ML = ~visible_keys(mask_BL, rows, causal=causal)
        with no_autocast(k_BHLK):
            exponents = self._masked_exponents(k_BHLK, mask_BL)
            bias = self._bias(rows, k_BHLK.shape[2], causal=causal)
            # One channel at a time, since a channel has as many weights as a map.
            map_BHML = exponents.new_zeros(*k_BHLK.shape[:2], *hidden_B1ML.shape[2:])
            for exponents_BHL in exponents.unbind(dim=-1):
                logits = exponents_BHL[:, :, None] + bias
                weights_BHML = logits.masked_fill(hidden_B1ML, floor_of(k_BHLK)).softmax(dim=-1)
                map_BHML += weights_BHML / exponents.shape[-1]
        return map_BHML.masked_fill(hidden_B1ML, 0)

    def _outputs(
        self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor, *, causal: bool
    ) -> Tensor:
        means_of = self._mixer(q_BHLK.shape[2], causal=causal)
        size = at_once(v_BHLC, v_BHLC[:, 0].numel(), cpu=_CPU_NUMBERS, gpu=_GPU_NUMBERS)
        # The gradient of a split is one tensor; every slice would have one for all heads.
        groups = zip(*(x.split(size, dim=1) for x in (q_BHLK, k_BHLK, v_BHLC)), strict=True)
        outs = [
            # Intermediate results are recomputed in the backward pass, not stored.
            recomputed(
                self._gated_means,
                *group,
                mask_BL,
                partial(means_of, slice(index * size, (index + 1) * size)),
            )
            for index, group in enumerate(groups)
        ]
        return torch.cat(outs, dim=1)

    def _gated_means(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        mask_BL: Tensor,
        means_of: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        exponents = self._masked_exponents(k_BHLK, mask_BL)
        means_BHLC = means_of(exponents, upcast(zero_padding(v_BHLC, mask_BL)))
        gate_BHLK = upcast(zero_padding(q_BHLK, mask_BL)).sigmoid()
        return zero_padding(gate_BHLK * means_BHLC, mask_BL).to(v_BHLC.dtype)

    def _masked_exponents(self, k_BHLK: Tensor, mask_BL: Tensor) -> Tensor:
        exponents = self._exponents(upcast(zero_padding(k_BHLK, mask_BL)))
        return exponents.masked_fill(~mask_BL[:, None, :, None], floor_of(k_BHLK))

    def _exponents(self, keys: Tensor) -> Tensor:
        """Returns x for keys (..., K): of every channel, or (..., 1) for all of them."""
        return keys

    @abstractmethod
    def _mixer(self, length: int, *, causal: bool) -> Mixer:
        """Returns the means of some heads; exponents at padding are very low, and values 0."""

    @abstractmethod
    def _bias(self, rows: slice, length: int, *, causal: bool) -> Tensor:
        """Returns w of some rows, broadcastable to HML; any value where a row cannot see a key."""


_STANDARD_DEVIATION = 0.01
# The products of smaller blocks would be too small to be efficient.
_SMALLEST_BLOCK = 32


class PositionBiases(nn.Module):
    """Tables u and v, max_length × rank, of the biases w = u vᵀ (arXiv 2105.14103, section 3)."""

    def __init__(self, *, max_length: int, rank: int) -> None:
        super().__init__()
        # The letters are the paper's.
        self.u = nn.Parameter(_STANDARD_DEVIATION * torch.randn(max_length, rank))
        self.v = nn.Parameter(_STANDARD_DEVIATION * torch.randn(max_length, rank))

    def blocks(self, length: int, size: int, *, causal: bool) -> Tensor:
        """Returns the biases of each block's rows and the keys of the block and its neighbors.

        (1, S, M, 2M), or (1, S, M, 3M) unless causal; 0 beyond the ends.
        """
        u, v = (to_blocks(upcast(x[None, None, :length]), size) for x in (self.u, self.v))
        return (u @ with_margins(v, before=size, after=0 if causal else size).mT)[0]


def rows_of_biases(rows: slice, length: int, u: Tensor, v: Tensor) -> Tensor:
    """Returns the biases u vᵀ of some rows and the first `length` keys, ML."""
    return upcast(u[:length])[rows] @ upcast(v[:length]).mT


def power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least the count."""
    return 1 << (count - 1).bit_length()


def block_size(window: int, length: int) -> int:
    """Returns a power of two, so that a window reaches no farther than the next block."""
    return power_of_two(max(min(window, length), _SMALLEST_BLOCK))


def offsets(size: int, *, causal: bool, device: torch.device) -> Tensor:
    """Returns i - j of a block's rows i and the keys j of the block and its neighbors.

    (size, 2 size) with the block before and its own, or (size, 3 size) with the one after.
    """
    row = torch.arange(size, device=device)
    key = torch.arange(-size, size if causal else 2 * size, device=device)
    return row[:, None] - key


class WindowWeights(NamedTuple):
    """Weights e^w of near pairs, (H or 1, blocks or 1, M, 2M or 3M), and others, (.., .., M, 1)."""

    near: Tensor
    far: Tensor

    @classmethod
    def of(cls, bias: Tensor) -> Self:
        """Converts the biases w of the pairs of `offsets`; all other pairs have w = 0."""
        # A factor of the row cancels in the mean.
        largest = bias.detach().amax(dim=-1, keepdim=True).clamp(min=0)
        return cls((bias - largest).exp(), (-largest).exp())


def windowed_means(
    weights: WindowWeights, heads: slice, exponents: Tensor, values: Tensor, *, causal: bool
) -> Tensor:
    """Computes Σ_j e^(x_j + w_ij) v_j / Σ_j e^(x_j + w_ij) for each i, over all j or j ≤ i.

    x is (B, H, L, K), or (B, H, L, 1) if all channels have the same; weights are those of all
    heads.
    """
    if len(weights.near) > 1:
        weights = WindowWeights(weights.near[heads], weights.far[heads])
    size = weights.near.shape[-2]
    blocks = to_blocks(exponents, size, value=floor_of(exponents)), to_blocks(values, size)
    sums = (_causal_sums if causal else _sums)(*blocks, weights)
    return from_blocks(sums.mean(), values.shape[2])


def _sums(exponents: Tensor, values: Tensor, weights: WindowWeights) -> SoftmaxSums:
    """Computes the sums of every row over all positions: (B, H, blocks, M, channels)."""
    reference = exponents.detach().amax(dim=(-3, -2), keepdim=True)
    terms = (exponents - reference).exp()

    def over_all(terms: Tensor) -> Tensor:
        size = terms.shape[-2]
        # Without a name, which would keep it alive.
        near = torch.einsum(
            "...ml,b...lc->b...mc", weights.near, with_margins(terms, before=size, after=size)
        )
        totals = terms.sum(dim=-2, keepdim=True)
        # Over the blocks before the previous one, and over those after the next one.
        before, after = (
            F.pad(x.cumsum(dim=-3), (0, 0, 0, 0, 2, 0))[..., :-2, :, :]
            for x in (totals, totals.flip(-3))
        )
        return near + weights.far * (before + after.flip(-3))

    return SoftmaxSums(reference, over_all(terms * values), over_all(terms))


def _causal_sums(exponents: Tensor, values: Tensor, weights: WindowWeights) -> SoftmaxSums:
    """Computes the sums of every row up to it: no reference depends on what follows the row."""
    terms = SoftmaxSums.terms(exponents, values)
    totals = terms.total().each(lambda x: x.squeeze(-2))
    far = totals.running().shifted(2, -2).each(lambda x: x[..., None, :])
    previous, own = weights.near.chunk(2, dim=-1)
    sums = triangle(exponents, values, own)
    sums = sums.plus(terms.shifted(1, -3).mixed(previous))
    return sums.plus(far.scaled(weights.far))


@final
@dataclass(frozen=True)
class WindowedState(StateParts):
    """Exponents and values of the last positions, in a ring, and the sums over all before them."""

    near: KeyValueCache
    far: SoftmaxSums

    def append(self, exponents: Tensor, values: Tensor) -> "WindowedState":
        """Writes one position, in place, over the oldest one, which becomes part of the sums."""
        near, far, slot = self.near, self.far, self.near.ring_slot()
        if near.length >= near.slots:
            oldest = near.k_BHMK[:, :, slot]
            far = far.plus(SoftmaxSums(oldest, near.v_BHMC[:, :, slot], torch.ones_like(oldest)))
        return WindowedState(near.append(exponents, values, slot=slot), far)


class WindowedAttentionFree(AttentionFree, Recurrent[WindowedState]):
    """An attention-free transformer whose w_ij is 0 where j is outside the window of i."""

    # Positions of a causal window, the row's own one included.
    _window: int

    @abstractmethod
    def _window_bias(self, row: int, key_M: Tensor) -> Tensor:
        """Returns w of one row and M keys in its window, (H or 1, M)."""

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> WindowedState:
        exponents, values = self._exponents(upcast(k_BHK)), upcast(v_BHC)
        near = KeyValueCache.empty(exponents, values, self._window)
        # An empty slot has the exponent of no weight.
        near.k_BHMK.fill_(floor_of(exponents))
        return WindowedState(near, SoftmaxSums.none(exponents, values))

    @torch.no_grad()
    def step(
        self,
        state: WindowedState,
        q_BHK: Tensor,
        k_BHK: Tensor,
        v_BHC: Tensor,
        context: Context,
    ) -> tuple[WindowedState, Tensor]:
        row = state.near.length
        self._refuse_longer(row + 1)
        with no_autocast(v_BHC):
            state = state.append(self._exponents(upcast(k_BHK)), upcast(v_BHC))
            key_M = state.near.ring_positions().clamp(min=0)
            exponents = state.near.k_BHMK + self._window_bias(row, key_M)[..., None]
            total = SoftmaxSums.terms(exponents, state.near.v_BHMC).total()
            near = total.each(lambda x: x.squeeze(-2))
            return state, (upcast(q_BHK).sigmoid() * state.far.plus(near).mean()).to(v_BHC.dtype)
