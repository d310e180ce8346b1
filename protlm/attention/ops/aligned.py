"""Exact softmax over the own protein's window and the aligned positions of its relatives.

A query at position p of a family sees 2 `around` + 1 positions of each relative, so that the cost
grows with the length of a row, and not with its square. Queries are sorted by their position and
then by their protein, and a block of them needs those keys of its family that are at consecutive
positions, of which, if no protein sees a later one, those of earlier proteins. A softmax over
several tiles of keys keeps the largest logit of each query and the sum of its weights, and the
backward pass recomputes the weights of a tile, as in FlashAttention (arXiv 2205.14135).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.ops.blocks import Window
from protlm.attention.ops.key_value_cache import KeyValueCache
from protlm.attention.ops.numerics import accum_dtype, no_autocast, softmax_weights, upcast
from protlm.bounds import Bounds

# Queries and keys of a tile: with fewer, calls take longer than what they compute; with more, a
# block of queries sees more keys that are masked, or a tile does not fit into a cache.
_QUERIES, _KEYS = 128, 4096
# A block has queries at this number of positions, or at `around` of them if that is more.
_POSITIONS = 16
# What is subtracted from the logit of a pair that is not seen: finite, so that no sum is NaN.
_HIDDEN = 1e30

_Index = slice | Tensor


class Sight(NamedTuple):
    """What a query sees.

    Attributes:
        window: the keys of its own protein, by their index; None for none of them.
        around: how far keys of other proteins of its family may be from its position there.
        later: whether it sees proteins after its own.
    """

    window: Window | None
    around: int
    later: bool


@final
@dataclass(frozen=True)
class AlignedKeys:
    """The keys and values of a context that was read before, sorted by their position.

    All samples share them, which are never modified: their first axis is 1.
    """

    k_1HMK: Tensor
    v_1HMC: Tensor
    position_1M: Tensor

    @classmethod
    def empty(cls, k_BHK: Tensor, v_BHC: Tensor) -> "AlignedKeys":
        """Creates a context without keys; keys and values give sizes and dtypes."""
        k_1HMK, v_1HMC = (x.new_zeros(1, x.shape[1], 0, x.shape[2]) for x in (k_BHK, v_BHC))
        return cls(k_1HMK, v_1HMC, torch.zeros(1, 0, dtype=torch.int64, device=k_BHK.device))

    def __getitem__(self, rows_B: Tensor) -> "AlignedKeys":
        return self

    def extended(self, k_1HLK: Tensor, v_1HLC: Tensor, bounds: Bounds) -> "AlignedKeys":
        """Returns these keys and those of a row of one family."""
        families = _families(bounds)
        ((start, end),) = families.spans.tolist()
        parts = (k_1HLK, self.k_1HMK), (v_1HLC, self.v_1HMC)
        k_1HMK, v_1HMC = (torch.cat([old, x[:, :, start:end]], dim=2) for x, old in parts)
        position_1M = torch.cat([self.position_1M, families.position_L[None, start:end]], dim=1)
        position_1M, order_1M = position_1M.sort(dim=1, stable=True)
        k_1HMK, v_1HMC = (x.index_select(2, order_1M[0]) for x in (k_1HMK, v_1HMC))
        return AlignedKeys(k_1HMK, v_1HMC, position_1M)

    def step(self, own: KeyValueCache, q_BHK: Tensor, position_B: Tensor, *, around: int) -> Tensor:
        """Attends from one position of every sample to its own window and to the context, BHC."""
        low, high = position_B.min() - around, position_B.max() + around
        ends = torch.stack([low, high + 1]).to(self.position_1M.dtype)
        start, end = torch.searchsorted(self.position_1M[0], ends).tolist()
        used = min(own.length, own.slots)
        k_BHMK, v_BHMC = (x[:, :, :used] for x in (own.k_BHMK, own.v_BHMC))
        k_HMK, v_HMC = (x[0, :, start:end] for x in (self.k_1HMK, self.v_1HMC))
        with no_autocast(q_BHK):
            q_HBK = upcast(q_BHK.transpose(0, 1)) / math.sqrt(q_BHK.shape[-1])
            near_BHM = (upcast(k_BHMK) @ q_HBK.transpose(0, 1)[..., None])[..., 0]
            far_BHM = (q_HBK @ upcast(k_HMK).mT).transpose(0, 1)
            offset_BM = self.position_1M[:, start:end] - position_B[:, None]
            far_BHM = far_BHM.masked_fill((offset_BM.abs() > around)[:, None], -math.inf)
            weights_BHM = torch.cat([near_BHM, far_BHM], dim=-1).softmax(dim=-1)
            near_BHM, far_BHM = weights_BHM.split([used, end - start], dim=-1)
            near_BHC = (near_BHM[:, :, None] @ upcast(v_BHMC))[:, :, 0]
            out_BHC = near_BHC + (far_BHM.transpose(0, 1) @ upcast(v_HMC)).transpose(0, 1)
        return out_BHC.to(own.v_BHMC.dtype)


@torch.compiler.disable
def aligned_softmax(
    q_1HLK: Tensor,
    k_1HLK: Tensor,
    v_1HLC: Tensor,
    *,
    bounds: Bounds,
    sight: Sight,
    entering: AlignedKeys | None = None,
) -> Tensor:
    """Computes softmax(q kᵀ / √K) v over what the queries of packed families see, 1HLC.

    Inputs at padding may be NaN. Outputs there are 0, and so is a query without keys.

    Args:
        entering: a context that every family of the row sees, as proteins before its own; only
            without gradients.
    """
    if entering is None:
        return _AlignedSoftmax.apply(q_1HLK, k_1HLK, v_1HLC, bounds, sight)
    assert not torch.is_grad_enabled() or not any(x.requires_grad for x in (q_1HLK, k_1HLK, v_1HLC))
    return _attend((q_1HLK, k_1HLK, v_1HLC), bounds, sight, entering)[0].to(v_1HLC.dtype)


def aligned_weights(
    q_1HLK: Tensor, k_1HLK: Tensor, *, mask_1L: Tensor, bounds: Bounds, sight: Sight, rows: slice
) -> Tensor:
    """Returns the weights of some queries for all keys of the row, 1HML, in O(M L) memory."""
    families = _families(bounds)
    index_L = torch.arange(len(families.segment_L), device=q_1HLK.device)
    offset_ML, apart_ML, strange_ML, shift_ML = (
        x_L - x_L[rows, None]
        for x_L in (index_L, bounds.segment_L, families.segment_L, families.position_L)
    )
    is_relative_ML = (apart_ML != 0) if sight.later else (apart_ML < 0)
    seen_ML = is_relative_ML & (shift_ML.abs() <= sight.around) & (strange_ML == 0)
    if sight.window is not None:
        seen_ML = seen_ML | (apart_ML == 0) & sight.window.sees(offset_ML)
    seen_ML = seen_ML & mask_1L & mask_1L[0, rows, None]
    return softmax_weights(q_1HLK[:, :, rows], k_1HLK, seen_ML)


class _Tile(NamedTuple):
    """Queries and keys that are computed at a time, by their indices."""

    rows: _Index
    keys: _Index


@dataclass(frozen=True)
class _Keys:
    """Keys of one kind: those of the own protein, of its relatives, or of a context.

    A query sees a key whose place is from `reach[0]` to `reach[1]` after its own, if `relates` is
    1, not 0, for the difference of their proteins. All are floating-point numbers, with which
    processors compare faster.
    """

    k_HMK: Tensor
    v_HMC: Tensor
    place_L: Tensor
    place_M: Tensor
    reach: tuple[int, int]
    protein_L: Tensor | None = None
    relates: Callable[[Tensor, int], Tensor] = torch.Tensor.eq_

    def seen(self, tile: _Tile) -> Tensor:
        """Returns 1 where a query sees a key and 0 elsewhere, ML."""
        least, most = self.reach
        offset_ML = self.place_M[tile.keys] - self.place_L[tile.rows][:, None]
        seen_ML = offset_ML.sub_((most + least) / 2).abs_().le_((most - least) / 2)
        if self.protein_L is None:
            return seen_ML
        apart_ML = self.protein_L[tile.keys] - self.protein_L[tile.rows][:, None]
        return seen_ML.mul_(self.relates(apart_ML, 0))

    def compared(self, q_HLK: Tensor, tile: _Tile) -> tuple[Tensor, ...]:
        """Returns scaled queries, keys and values of a tile, what is seen, and the logits."""
        q_HMK = upcast(q_HLK[:, tile.rows]) / math.sqrt(q_HLK.shape[-1])
        k_HLK, v_HLC = (upcast(x[:, tile.keys]) for x in (self.k_HMK, self.v_HMC))
        seen_ML = self.seen(tile)
        logits_HML = torch.baddbmm(seen_ML - 1, q_HMK, k_HLK.mT, beta=_HIDDEN)
        return q_HMK, k_HLK, v_HLC, seen_ML, logits_HML


class _AlignedSoftmax(torch.autograd.Function):
    """`apply(q, k, v, bounds, sight)` returns the output, 1HLC, in the dtype of v."""

    @staticmethod
    def forward(
        ctx: Any, q_1HLK: Tensor, k_1HLK: Tensor, v_1HLC: Tensor, bounds: Bounds, sight: Sight
    ) -> Tensor:
        out_1HLC, level_HL1 = _attend((q_1HLK, k_1HLK, v_1HLC), bounds, sight)
        ctx.save_for_backward(q_1HLK, k_1HLK, v_1HLC, out_1HLC, level_HL1)
        ctx.bounds, ctx.sight = bounds, sight
        return out_1HLC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1HLC: Tensor) -> tuple[Tensor | None, ...]:
        *heads, out_1HLC, level_HL1 = ctx.saved_tensors
        q_HLK, scale = heads[0][0], 1 / math.sqrt(heads[0].shape[-1])
        sums = [torch.zeros_like(x[0], dtype=level_HL1.dtype) for x in heads]
        d_q_HLK, d_k_HLK, d_v_HLC = sums
        with no_autocast(q_HLK):
            for keys, tile in _tiles(heads, ctx.bounds, ctx.sight):
                q_HMK, k_HLK, v_HLC, seen_ML, logits_HML = keys.compared(q_HLK, tile)
                weights_HML = _exp(logits_HML.sub_(level_HL1[:, tile.rows])).mul_(seen_ML)
                grad_HMC, out_HMC = (upcast(x[0, :, tile.rows]) for x in (grad_1HLC, out_1HLC))
                grad_HMC = grad_HMC.to(level_HL1.dtype)
                d_v_HLC[:, tile.keys] += weights_HML.mT @ grad_HMC
                mean_HM1 = (grad_HMC * out_HMC).sum(dim=-1, keepdim=True)
                slope_HML = (grad_HMC @ v_HLC.mT).sub_(mean_HM1).mul_(weights_HML)
                d_q_HLK[:, tile.rows] += (slope_HML @ k_HLK).mul_(scale)
                d_k_HLK[:, tile.keys] += slope_HML.mT @ q_HMK
        return *(x[None].to(y.dtype) for x, y in zip(sums, heads, strict=True)), None, None


def _attend(
    heads: Sequence[Tensor], bounds: Bounds, sight: Sight, entering: AlignedKeys | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the output, 1HLC, and the logarithm of each query's sum of exponentials, HL1."""
    q_HLK, v_HLC = heads[0][0], heads[2][0]
    total_HL1 = torch.zeros_like(q_HLK[..., :1], dtype=accum_dtype(q_HLK))
    top_HL1 = torch.full_like(total_HL1, -_HIDDEN)
    out_HLC = torch.zeros_like(v_HLC, dtype=total_HL1.dtype)
    with no_autocast(q_HLK):
        for keys, (rows, columns) in _tiles(heads, bounds, sight, entering):
            _, _, v_HMC, seen_ML, logits_HML = keys.compared(q_HLK, _Tile(rows, columns))
            before_HM1 = top_HL1[:, rows]
            top_HM1 = torch.maximum(before_HM1, logits_HML.amax(dim=-1, keepdim=True))
            weights_HML = _exp(logits_HML.sub_(top_HM1)).mul_(seen_ML)
            # What came before counts less by the larger maximum.
            less_HM1 = _exp(before_HM1 - top_HM1)
            top_HL1[:, rows] = top_HM1
            parts = (out_HLC, weights_HML @ v_HMC), (total_HL1, weights_HML.sum(-1, keepdim=True))
            for sums, more in parts:
                sums[:, rows] = sums[:, rows] * less_HM1 + more
    # A query without keys is 0 / 1.
    total_HL1 += total_HL1 == 0
    return out_HLC.div_(total_HL1)[None].to(v_HLC.dtype), top_HL1 + total_HL1.log()


def _exp(x: Tensor) -> Tensor:
    """Computes exp(x) in place; what would underflow is about the smallest number."""
    # A result that underflows takes ten times as long on some processors.
    return x.clamp_(min=math.log(torch.finfo(x.dtype).tiny) + 1).exp_()


def _tiles(
    heads: Sequence[Tensor], bounds: Bounds, sight: Sight, entering: AlignedKeys | None = None
) -> Iterator[tuple[_Keys, _Tile]]:
    """Yields tiles that together have all pairs of queries and keys that see each other, once."""
    families, k_HLK, v_HLC = _families(bounds), heads[1][0], heads[2][0]
    dtype, device, spans = accum_dtype(heads[0]), k_HLK.device, families.spans.tolist()
    position_L, protein_L = (x.to(dtype) for x in (families.position_L, bounds.segment_L))
    if sight.window is not None:
        index_L, reach = torch.arange(len(protein_L)).to(position_L), sight.window
        own = _Keys(k_HLK, v_HLC, index_L, index_L, (-reach.before, reach.after), protein_L)
        yield from ((own, tile) for span in spans for tile in _own_tiles(*span, bounds, reach))
    near, relates = (-sight.around, sight.around), "ne_" if sight.later else "lt_"
    relatives = _Keys(
        k_HLK, v_HLC, position_L, position_L, near, protein_L, getattr(Tensor, relates)
    )
    place_L, number_L = (x.cpu().numpy() for x in (families.position_L, bounds.segment_L))
    for start, end in spans:
        if number_L[start] == number_L[end - 1]:
            continue
        index = np.arange(start, end)
        sorted_by_place = index[place_L[start:end].argsort(kind="stable")]
        for rows, keys in _blocks(index, place_L, place_L[sorted_by_place], sight.around):
            columns = sorted_by_place[keys]
            if not sight.later:
                columns = columns[number_L[columns] < number_L[rows].max()]
            if len(columns):
                pair = (torch.from_numpy(x).to(device) for x in (rows, columns))
                yield relatives, _Tile(*pair)
    if entering is not None:
        place_M = entering.position_1M[0]
        context = _Keys(entering.k_1HMK[0], entering.v_1HMC[0], position_L, place_M.to(dtype), near)
        index = np.concatenate([np.arange(*span) for span in spans])
        for rows, keys in _blocks(index, place_L, place_M.cpu().numpy(), sight.around):
            yield context, _Tile(torch.from_numpy(rows).to(device), keys)


def _own_tiles(start: int, end: int, bounds: Bounds, window: Window) -> Iterator[_Tile]:
    """Yields tiles of the windows of a family's queries, in which a query may see some keys."""
    for first in range(start, end, _QUERIES):
        last = min(first + _QUERIES, end)
        proteins = bounds.spans[:, 0].searchsorted([first, last - 1], side="right") - 1
        (low, _), (_, high) = bounds.spans[proteins].tolist()
        low, high = max(low, first - window.before), min(high, last + window.after)
        for keys in range(low, high, _KEYS):
            yield _Tile(slice(first, last), slice(keys, min(keys + _KEYS, high)))


def _blocks(
    index: np.ndarray, place_L: np.ndarray, place_M: np.ndarray, around: int
) -> Iterator[tuple[np.ndarray, slice]]:
    """Yields blocks of queries at near places with those of the sorted keys that they may see."""
    width = max(around // 2, 1)
    bins = place_L[index] // width
    order = bins.argsort(kind="stable")
    index, bins = index[order], bins[order]
    first = 0
    while first < len(index):
        beyond = bins.searchsorted(bins[first] + max(_POSITIONS // width, 2))
        rows = index[first : min(first + _QUERIES, beyond)]
        first += len(rows)
        low = place_M.searchsorted(place_L[rows].min() - around)
        high = place_M.searchsorted(place_L[rows].max() + around, side="right")
        for keys in range(low, high, _KEYS):
            yield rows, slice(keys, min(keys + _KEYS, high))


def _families(bounds: Bounds) -> Bounds:
    assert bounds.families is not None
    return bounds.families
