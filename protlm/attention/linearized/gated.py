"""Sums Σ_j g_ij φ(q_i)·φ(k_j) v_j, where g_ij is a product of gates between i and j.

With a gate g_k in (0, 1] for each position and head (LION-S, Afzal et al., arXiv 2502.16249; the
recurrence S_i = g_i S_{i-1} + φ(k_i) v_iᵀ in either direction),

    g_ij = g_{j+1} … g_i for j < i,  1 for j = i,  g_i … g_{j-1} for j > i

and only j ≤ i in causal attention, which is gated linear attention with one gate per head (Yang et
al., arXiv 2312.06635). A constant gate is γ^|i-j| (RetNet, Sun et al., arXiv 2307.08621).

Within a chunk of 64 positions, g_ij is the exponential of a difference of two sums over the chunk;
between chunks there are states, sums of vᵀφ(k) over all keys before a chunk, decayed to its first
position, and over all keys after it, decayed to its last. All exponents are at most 0 and relative
to one chunk, so that nothing overflows or drifts, and what vanishes has no weight. The states
before or after each tile are kept for the backward pass, and features are recomputed in it.

Nothing is ever divided by a gate or subtracted from a state. NaN and infinities affect their whole
chunk. Tensors without a suffix are in chunks, (B, H, chunks, 64, width).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from protlm.attention.linearized.features import FeatureMap
from protlm.attention.linearized.gates import pairs
from protlm.attention.linearized.operands import Operands
from protlm.attention.linearized.positive import LOG2_E
from protlm.attention.linearized.tiles import Tile, chunked, positions, tiles
from protlm.attention.ops.numerics import no_autocast
from protlm.attention.ops.products import matrix_product


class GatedSums(torch.autograd.Function):
    """`apply(q, k, v, log_gate, mask, feature_map, causal)` returns the sums, BHLC.

    `log_gate` is BHL1, and 0 at padding. Sums are in float32, or in float64 for float64 queries.
    Those of padding are arbitrary finite numbers, and must have no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        log_gate_BHL1: Tensor,
        mask_BL: Tensor,
        feature_map: FeatureMap,
        causal: bool,
    ) -> Tensor:
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL, feature_map)
        sums_BHLC = v_BHLC.new_empty(v_BHLC.shape, dtype=operands.dtype)
        # States and their increments are as large as the features.
        groups = list(tiles(q_BHLK, num_features=feature_map.num_features(q_BHLK.shape[-1]) * 2))
        references, states = [], []
        with no_autocast(v_BHLC):
            for group in groups:
                operands.reference_BH1R = None
                for tile, sums, entering in _sums(operands, log_gate_BHL1, group, causal=causal):
                    tile.of(sums_BHLC)[:] = sums
                    states += entering
                references.append(operands.reference_BH1R)
        ctx.feature_map, ctx.causal, ctx.groups = feature_map, causal, groups
        # The projection is saved so that a redraw before the backward pass is an error.
        inputs = q_BHLK, k_BHLK, v_BHLC, log_gate_BHL1, mask_BL, feature_map.projection_RK
        ctx.save_for_backward(*inputs, *references, *states)
        return sums_BHLC

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        # Accessed once: activation checkpointing does not allow a second access.
        q_BHLK, k_BHLK, v_BHLC, log_gate_BHL1, mask_BL, _, *rest = ctx.saved_tensors
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL, ctx.feature_map)
        references, states = rest[: len(ctx.groups)], rest[len(ctx.groups) :]
        gradients = [torch.empty_like(x) for x in (q_BHLK, k_BHLK, v_BHLC, log_gate_BHL1)]
        compute = partial(_gradients, operands, log_gate_BHL1, grad_outputs[0], causal=ctx.causal)
        with no_autocast(v_BHLC):
            for group, reference in zip(ctx.groups, references, strict=True):
                operands.reference_BH1R = reference
                number = len(group) * (1 if ctx.causal else 2)
                for tile, found in compute(group, states[:number]):
                    for gradient, part in zip(gradients, found, strict=True):
                        tile.of(gradient)[:] = operands.clear_padding(part, tile)
                states = states[number:]
        return *gradients, None, None, None


# With the type that `apply` lacks.
gated_sums: Callable[..., Tensor] = GatedSums.apply


class _Direction(NamedTuple):
    """Decays of queries and keys of a tile in chunks, (..., 64, 1), in one direction.

    Keys before a chunk (reverse: after it) reach its queries by `of_queries`, and its keys reach
    those of the next chunk by `of_keys`; `whole` is the decay over a chunk, (..., 1, 1).
    """

    of_queries: Tensor
    of_keys: Tensor
    whole: Tensor
    reverse: bool

    def states(
        self, keys: Tensor, phi: Tensor, first: Tensor | None, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the sums of keysᵀφ before each chunk (reverse: after it), and over all of them.

        Keys are decayed to the end of their chunk. `first` is the sum before the tile (reverse:
        after it), (B, H, C, R); None for 0.
        """
        increments = matrix_product(keys.mT, phi, dtype=dtype)
        if first is None:
            first = torch.zeros_like(increments[:, :, 0])
        return _scan(increments, self.whole, first, reverse=self.reverse)

    def transposed(self) -> "_Direction":
        """Returns the direction in which gradients flow: queries in the place of keys."""
        return _Direction(self.of_keys, self.of_queries, self.whole, not self.reverse)


def _directions(
    log_gate_BHL1: Tensor, tile: Tile, *, causal: bool
) -> tuple[list[_Direction], Tensor]:
    """Returns the directions of keys, and the decays of the pairs of a chunk, (..., 64, 64)."""
    log_gate = chunked(tile.of(log_gate_BHL1)) * LOG2_E
    until = log_gate.cumsum(dim=3)
    before, total = until - log_gate, until[..., -1:, :]
    whole = total.exp2()
    directions = [_Direction(until.exp2(), (total - until).exp2_(), whole, reverse=False)]
    weights = pairs(until, before, until, before).exp2_()
    if causal:
        return directions, weights.tril_()
    return [*directions, _Direction((total - before).exp2_(), before.exp2(), whole, True)], weights


def _scan(
    increments: Tensor, whole: Tensor, first: Tensor, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Returns the running sums s ← whole s + increment before each chunk, and the last one."""
    if increments.device.type != "cpu" or is_compiling():
        return _doubling(increments, whole, first, reverse=reverse)
    states, state = [], first
    chunks = list(zip(increments.unbind(2), whole.unbind(2), strict=True))
    for increment, factor in reversed(chunks) if reverse else chunks:
        states.append(state)
        state = torch.addcmul(increment, state, factor)
    return torch.stack(states[::-1] if reverse else states, dim=2), state


def _doubling(
    increments: Tensor, whole: Tensor, first: Tensor, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Computes `_scan` in log₂ S steps for S chunks, each for all of them."""
    if reverse:
        increments, whole = increments.flip(2), whole.flip(2)
    sums = torch.cat([first[:, :, None], increments], dim=2)
    factors = torch.cat([torch.ones_like(whole[:, :, :1]), whole], dim=2)
    step = 1
    while step < sums.shape[2]:
        later = torch.addcmul(sums[:, :, step:], sums[:, :, :-step], factors[:, :, step:])
        sums = torch.cat([sums[:, :, :step], later], dim=2)
        later = factors[:, :, step:] * factors[:, :, :-step]
        factors = torch.cat([factors[:, :, :step], later], dim=2)
        step *= 2
    states = sums[:, :, :-1]
    # A view would keep the sums of all chunks alive.
    return states.flip(2) if reverse else states.contiguous(), sums[:, :, -1].clone()


def _sums(
    operands: Operands, log_gate_BHL1: Tensor, group: list[Tile], *, causal: bool
) -> Iterator[tuple[Tile, Tensor, list[Tensor | None]]]:
    """Yields the sums of each tile, and the states that enter it from other tiles."""
    dtype = operands.product_dtype
    multiply, before = partial(matrix_product, dtype=dtype), None
    after: list[Tensor | None] = [None]
    if not causal:
        for tile in group:
            operands.raise_reference(tile)
        for tile in reversed(group[1:]):
            (_, backward), _ = _directions(log_gate_BHL1, tile, causal=False)
            values = chunked(operands.values(tile)) * backward.of_keys
            phi_k = chunked(operands.keys(tile).phi_BHLR)
            after.append(backward.states(values, phi_k, after[-1], dtype)[1])
    for tile in group:
        # Keys first: those of causal attention decide the reference.
        phi_k = chunked(operands.keys(tile, causal=causal).phi_BHLR)
        phi_q = chunked(operands.queries(tile).phi_BHLR)
        values = chunked(operands.values(tile))
        directions, decays = _directions(log_gate_BHL1, tile, causal=causal)
        sums = multiply(multiply(phi_q, phi_k.mT).mul_(decays), values)
        entering = [before] if causal else [before, after.pop()]
        for direction, first in zip(directions, entering, strict=True):
            states, last = direction.states(values * direction.of_keys, phi_k, first, dtype)
            sums = multiply(phi_q * direction.of_queries, states.mT, onto=sums)
            before = before if direction.reverse else last
        yield tile, positions(sums, tile), entering


def _gradients(
    operands: Operands,
    log_gate_BHL1: Tensor,
    dsums_BHLC: Tensor,
    group: list[Tile],
    states: list[Tensor | None],
    *,
    causal: bool,
) -> Iterator[tuple[Tile, list[Tensor]]]:
    """Yields the gradients of queries, keys, values and logarithms of gates of each tile."""
    dtype = operands.product_dtype
    multiply, after = partial(matrix_product, dtype=dtype), None
    before: list[Tensor | None] = [None]
    for tile in group[:-1] if not causal else []:
        (_, backward), _ = _directions(log_gate_BHL1, tile, causal=False)
        dsums = chunked(tile.of(dsums_BHLC)) * backward.of_queries
        phi_q = chunked(operands.queries(tile).phi_BHLR)
        before.append(backward.transposed().states(dsums, phi_q, before[-1], dtype)[1])
    for tile in reversed(group):
        phi_k, key_pullback = operands.keys(tile, causal=causal)
        phi_q, query_pullback = operands.queries(tile)
        given = phi_q, phi_k, operands.values(tile), tile.of(dsums_BHLC)
        phi_q, phi_k, values, dsums = (chunked(x) for x in given)
        directions, decays = _directions(log_gate_BHL1, tile, causal=causal)
        weights = multiply(phi_q, phi_k.mT).mul_(decays)
        dweights = multiply(dsums, values.mT)
        # Of the pairs within a chunk, without those of a position and itself.
        flows = weights * dweights
        flows.diagonal(dim1=-2, dim2=-1).zero_()
        whole = _queries_less_keys(flows)
        downward = whole if causal else _queries_less_keys(flows.tril_())
        upward = whole - downward
        dweights.mul_(decays)
        dphi_q, dphi_k = multiply(dweights, phi_k), multiply(dweights.mT, phi_q)
        dvalues, dlog_gate = multiply(weights.mT, dsums), torch.zeros_like(phi_q[..., :1])
        leaving = [after] if causal else [after, before.pop()]
        for direction, last in zip(reversed(directions), reversed(leaving), strict=True):
            given_k, given_q = values * direction.of_keys, dsums * direction.of_queries
            of_keys, _ = direction.states(given_k, phi_k, states.pop(), dtype)
            of_queries, end = direction.transposed().states(given_q, phi_q, last, dtype)
            after = after if direction.reverse else end
            from_keys, from_queries = multiply(given_q, of_keys), multiply(given_k, of_queries)
            dphi_q += from_keys
            dphi_k += from_queries
            dvalues = multiply(phi_k * direction.of_keys, of_queries.mT, onto=dvalues)
            dlog_gate += (of_keys * of_queries).sum((-2, -1), keepdim=True) * direction.whole
            flows = [(x * y).sum(-1, True) for x, y in ((phi_q, from_keys), (phi_k, from_queries))]
            inside = upward if direction.reverse else downward
            dlog_gate += _crossing(inside, *flows, reverse=direction.reverse)
        dq, dk = query_pullback(positions(dphi_q, tile)), key_pullback(positions(dphi_k, tile))
        yield tile, [dq, dk, positions(dvalues, tile), positions(dlog_gate, tile)]


def _crossing(inside: Tensor, queries: Tensor, keys: Tensor, *, reverse: bool) -> Tensor:
    """Sums weights times their gradients over the pairs that have each gate between them.

    Given are the sums of pairs inside a chunk over the others of each query, less that of each key,
    and those of its queries, and of its keys, with positions of other chunks; all (..., 64, 1).
    """
    inner = _running(inside + queries, reverse=not reverse)
    return inner + _running(keys, reverse=reverse) - keys


def _queries_less_keys(flows: Tensor) -> Tensor:
    return flows.sum(-1, keepdim=True) - flows.sum(-2)[..., None]


def _running(x: Tensor, *, reverse: bool) -> Tensor:
    return x.flip(-2).cumsum(-2).flip(-2) if reverse else x.cumsum(-2)
