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
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.ops.blocks import Window
from protlm.attention.ops.key_value_cache import KeyValueCache
from protlm.attention.ops.numerics import no_autocast, not_compiled, softmax_weights, upcast
from protlm.bounds import Bounds

# Queries of a tile, and keys of relatives: with fewer, calls take longer than what they compute;
# with more, a block of queries has more keys that are hidden, or a tile does not fit into a cache.
_QUERIES, _KEYS = 128, 8192
# The queries of a block are at this number of positions at most, or at `around` if that is more.
_POSITIONS = 32
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

    def step(self, own: KeyValueCache, q_BHK: Tensor, *, around: int) -> Tensor:
        """Attends from the last position of every sample to its window and to the context, BHC."""
        position = own.length - 1
        ends = self.position_1M.new_tensor([position - around, position + around + 1])
        start, end = torch.searchsorted(self.position_1M[0], ends).tolist()
        used, pairs = (
            min(own.length, own.slots),
            zip((own.k_BHMK, own.v_BHMC), (self.k_1HMK, self.v_1HMC), strict=True),
        )
        k, v = (
            torch.cat(
                [near[:, :, :used], far[:, :, start:end].expand(len(near), -1, -1, -1)], dim=2
            )
            for near, far in pairs
        )
        return KeyValueCache(k, v, k.shape[2]).attend(q_BHK)


@not_compiled
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
    return _attend((q_1HLK, k_1HLK, v_1HLC), bounds, sight, entering)[0]


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


@dataclass(frozen=True)
class _Keys:
    """Keys of one kind: those of the own protein, of its relatives, or of a context.

    A query sees a key if their places differ by `reach` at most, and if the number of the key's
    protein less that of the query's is not what `hides` compares with 0. All these numbers are
    floating-point ones, which processors compare faster.
    """

    k_HMK: Tensor
    v_HMC: Tensor
    place_L: Tensor
    place_M: Tensor
    reach: float
    protein_L: Tensor | None = None
    hides: Callable[[Tensor, int], Tensor] = Tensor.ne_

    def compared(self, q_HLK: Tensor, rows: _Index, keys: _Index) -> tuple[Tensor, ...]:
        """Returns queries, keys and values of a tile, and the logits, HMP."""
        q_HMK = _taken(q_HLK, rows)
        k_HPK, v_HPC = (upcast(_taken(x, keys)) for x in (self.k_HMK, self.v_HMC))
        logits_HMP = q_HMK @ k_HPK.mT
        hidden_MP = (self.place_M[keys] - self.place_L[rows][:, None]).abs_().gt_(self.reach)
        if self.protein_L is not None:
            number_MP = self.protein_L[keys] - self.protein_L[rows][:, None]
            hidden_MP.add_(self.hides(number_MP, 0))
        return q_HMK, k_HPK, v_HPC, logits_HMP.add_(hidden_MP, alpha=-_HIDDEN)


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
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, grad_1HLC: Tensor
    ) -> tuple[Tensor | None, ...]:
        *given, out_1HLC, level_HL1 = ctx.saved_tensors
        heads, grad_HLC = _prepared(given), grad_1HLC[0].to(level_HL1.dtype)
        mean_HL1 = (grad_HLC * out_1HLC[0]).sum(dim=-1, keepdim=True)
        sums = [torch.zeros_like(x) for x in heads]
        with no_autocast(grad_HLC):
            for kind, rows, keys in _tiles(heads, ctx.bounds, ctx.sight):
                q_HMK, k_HPK, v_HPC, logits_HMP = kind.compared(heads[0], rows, keys)
                weights_HMP = _exp(logits_HMP.sub_(_taken(level_HL1, rows)))
                grad_HMC = _taken(grad_HLC, rows)
                slope_HMP = (grad_HMC @ v_HPC.mT).sub_(_taken(mean_HL1, rows)).mul_(weights_HMP)
                _put(sums[0], rows, _taken(sums[0], rows) + slope_HMP @ k_HPK)
                _put(sums[1], keys, _taken(sums[1], keys) + slope_HMP.mT @ q_HMK)
                _put(sums[2], keys, _taken(sums[2], keys) + weights_HMP.mT @ grad_HMC)
        sums[0] /= math.sqrt(sums[0].shape[-1])
        return *(x[None].to(y.dtype) for x, y in zip(sums, given, strict=True)), None, None


def _attend(
    given: Sequence[Tensor], bounds: Bounds, sight: Sight, entering: AlignedKeys | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the output, 1HLC, and the logarithm of each query's sum of exponentials, HL1."""
    heads = _prepared(given)
    # The last column is the sum of weights.
    sums = F.pad(torch.zeros_like(heads[2]), (0, 1))
    # Above hidden logits, so that their exponentials are 0 even where there are no others.
    top_HL1 = torch.full_like(sums[..., :1], -_HIDDEN / 2)
    with no_autocast(sums):
        for kind, rows, keys in _tiles(heads, bounds, sight, entering):
            _, _, v_HPC, logits_HMP = kind.compared(heads[0], rows, keys)
            before_HM1 = _taken(top_HL1, rows)
            top_HM1 = torch.maximum(before_HM1, logits_HMP.amax(dim=-1, keepdim=True))
            less_HM1 = _exp(before_HM1 - top_HM1)
            weights_HMP = _exp(logits_HMP.sub_(top_HM1))
            parts = weights_HMP @ v_HPC, weights_HMP.sum(dim=-1, keepdim=True)
            _put(sums, rows, torch.cat(parts, dim=-1) + _taken(sums, rows) * less_HM1)
            _put(top_HL1, rows, top_HM1)
    out_HLC, total_HL1 = sums.split([sums.shape[-1] - 1, 1], dim=-1)
    # A query without keys is 0 / 1.
    total_HL1 = total_HL1 + (total_HL1 == 0)
    return (out_HLC / total_HL1)[None].to(given[2].dtype), top_HL1 + total_HL1.log()


def _prepared(given: Sequence[Tensor]) -> list[Tensor]:
    """Returns scaled queries, keys and values, HLK, in the dtype and layout of sums."""
    q_HLK, k_HLK, v_HLC = (upcast(x[0]).contiguous() for x in given)
    return [q_HLK / math.sqrt(q_HLK.shape[-1]), k_HLK, v_HLC]


def _exp(x: Tensor) -> Tensor:
    """Computes exp(x) in place, and 0 where it is almost too small for the dtype."""
    # Some processors take ten times as long for what underflows.
    least = math.log(torch.finfo(x.dtype).tiny)
    return torch.threshold_(x.clamp_(min=least + 1).exp_(), math.exp(least + 2), 0)


def _taken(x_HLK: Tensor, index: _Index) -> Tensor:
    """Returns some positions, faster than by an index."""
    return x_HLK[:, index] if isinstance(index, slice) else x_HLK.index_select(1, index)


def _put(x_HLK: Tensor, index: _Index, new_HMK: Tensor) -> None:
    if isinstance(index, slice):
        x_HLK[:, index] = new_HMK
    else:
        x_HLK.index_copy_(1, index, new_HMK)


def _tiles(
    heads: Sequence[Tensor], bounds: Bounds, sight: Sight, entering: AlignedKeys | None = None
) -> Iterator[tuple[_Keys, _Index, _Index]]:
    """Yields tiles of queries and keys, in which each pair that is seen is once."""
    _, k_HLK, v_HLC = heads
    families, window, around = _families(bounds), sight.window, sight.around
    position_L, protein_L = (x.to(k_HLK) for x in (families.position_L, bounds.segment_L))
    if window is not None:
        index_L = torch.arange(len(position_L)).to(k_HLK)
        # A key is seen if it is near the middle of the window.
        middle_L, reach = index_L + (window.after - window.before) / 2, window.before + window.after
        own = _Keys(k_HLK, v_HLC, middle_L, index_L, reach / 2, protein_L)
        yield from ((own, *tile) for tile in _own_tiles(bounds, window))
    hides = Tensor.eq_ if sight.later else Tensor.ge_
    relatives = _Keys(k_HLK, v_HLC, position_L, position_L, around, protein_L, hides)
    for pair in _relatives_tiles(bounds, sight):
        rows, keys = (torch.from_numpy(x).to(k_HLK.device) for x in pair)
        yield relatives, rows, keys
    if entering is not None:
        position_M = entering.position_1M[0]
        near = position_L, position_M.to(k_HLK), around
        context = _Keys(entering.k_1HMK[0], entering.v_1HMC[0], *near)
        index = np.concatenate([np.arange(*span) for span in families.spans])
        place_L, place_M = (x.cpu().numpy() for x in (families.position_L, position_M))
        for rows, keys in _blocks(index, place_L, place_M, around, shortest=1):
            yield context, torch.from_numpy(rows).to(k_HLK.device), keys


def _own_tiles(bounds: Bounds, window: Window) -> Iterator[tuple[slice, slice]]:
    """Yields tiles of consecutive queries and what their windows reach of their proteins."""
    for start, end in _families(bounds).spans.tolist():
        for first in range(start, end, _QUERIES):
            last = min(first + _QUERIES, end)
            proteins = bounds.spans[:, 0].searchsorted([first, last - 1], side="right") - 1
            (low, _), (_, high) = bounds.spans[proteins].tolist()
            low, high = max(low, first - window.before), min(high, last + window.after)
            yield slice(first, last), slice(low, high)


def _relatives_tiles(bounds: Bounds, sight: Sight) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields tiles of queries and keys of their relatives, of which a query may see some."""
    families = _families(bounds)
    place_L, number_L = (x.cpu().numpy() for x in (families.position_L, bounds.segment_L))
    # Of wider blocks, in which queries are sorted by their protein, earlier ones need fewer keys.
    shortest = 1 if sight.later else sight.around // 2
    for start, end in families.spans.tolist():
        index = np.arange(start, end)
        if number_L[start] == number_L[end - 1]:
            continue
        index_M = index[place_L[start:end].argsort(kind="stable")]
        for rows, keys in _blocks(index, place_L, place_L[index_M], sight.around, shortest):
            columns = index_M[keys]
            if not sight.later:
                columns = columns[number_L[columns] < number_L[rows[-1]]]
            if len(columns):
                yield rows, columns


def _blocks(
    index: np.ndarray, place_L: np.ndarray, place_M: np.ndarray, around: int, shortest: int
) -> Iterator[tuple[np.ndarray, slice]]:
    """Yields queries at near places, in their order, with the sorted keys that they may see.

    Queries are at as many places as a block has room for, but `shortest` at least.
    """
    place = place_L[index]
    density = len(index) / (np.ptp(place) + 1)
    longest = max(around, _POSITIONS)
    bins = place // int(np.clip(_QUERIES / density, max(shortest, 1), longest))
    order = bins.argsort(kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(bins[order])) + 1):
        for block in np.array_split(group, math.ceil(len(group) / _QUERIES)):
            low = place_M.searchsorted(place[block].min() - around)
            high = place_M.searchsorted(place[block].max() + around, side="right")
            for key in range(low, high, _KEYS):
                yield index[block], slice(key, min(key + _KEYS, high))


def _families(bounds: Bounds) -> Bounds:
    assert bounds.families is not None
    return bounds.families
