"""Linear attention O_i = φ(q_i) Σ_j φ(k_j)ᵀ[v_j | 1], normalized (arXiv 2009.14794, eq. 4 and B.1).

Features are computed a tile at a time, and recomputed in the backward pass, except exponentials in
bfloat16 on a CPU, which are kept. A state is a sum of [v | 1]ᵀφ(k) over keys, (C + 1, R) for each
head. In bidirectional attention it is over all of them.

In causal attention, the weights within a chunk of 64 positions are a masked 64×64 product; between
chunks, there are prefix sums, the states, of which only those before each tile are kept. Nothing is
ever subtracted from a state, so that later positions do not affect earlier ones, not even by
rounding. The exceptions are NaN and infinities, which affect their whole chunk, since 0·NaN is NaN.

Tensors without a suffix have the samples, heads and positions of a tile, or are in its chunks:
(B, H, chunks, 64, width). Values and sums include the column of the denominator.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from protlm.attention.linearized.features import FeatureMap
from protlm.attention.linearized.normalization import Denominator
from protlm.attention.linearized.operands import Operands, rounds_on_cpu
from protlm.attention.linearized.tiles import WHOLE, States, Tile, chunked, positions, tiles
from protlm.attention.ops.blocks import from_blocks
from protlm.attention.ops.numerics import no_autocast, zero_padding
from protlm.attention.ops.products import matrix_product, product
from protlm.bounds import Spans

# Takes a tile, a number of its three gradients (of q, k or v), and the gradient.
_Write = Callable[[Tile, int, Tensor], None]


class Weighting(NamedTuple):
    """What decides the weights: features, their normalizer, and whether keys have to be earlier.

    Attributes:
        entering: of causal spans, the state (1, H, C + 1, R) of keys before each of them, and its
            reference or None; without gradients.
    """

    feature_map: FeatureMap
    normalizer: Denominator
    causal: bool
    spans: Spans | None = None
    entering: tuple[Tensor, Tensor | None] | None = None


class LinearAttentionFunction(torch.autograd.Function):
    """`apply(q, k, v, mask, weighting)` returns the output, BHLC, in the dtype of v."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        mask_BL: Tensor,
        weighting: Weighting,
    ) -> Tensor:
        feature_map, normalizer, causal, spans, entering = weighting
        # The backward pass takes what was kept, wherever it runs.
        ctx.rounds = rounds = rounds_on_cpu(feature_map, q_BHLK, v_BHLC)
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL, feature_map, rounds_on_cpu=rounds)
        operands.keeps &= any(ctx.needs_input_grad)
        # torch.compile functionalizes in-place writes, and then loses the strides.
        strides = torch.contiguous_format if is_compiling() else torch.preserve_format
        # What is outside of spans stays 0.
        out_BHLC = torch.zeros_like(v_BHLC, memory_format=strides)
        saved_BHL1 = torch.empty_like(v_BHLC[..., :1], dtype=operands.dtype)

        def write(tile: Tile, sums: Tensor) -> None:
            tile.of(out_BHLC)[:], tile.of(saved_BHL1)[:] = normalizer(sums)
            operands.clear_padding(tile.of(out_BHLC), tile)

        # The state of a chunk, its gradient and their increments are as large as its features.
        num_features = feature_map.num_features(q_BHLK.shape[-1]) * (2 if causal else 1)
        size = operands.value_dtype.itemsize if operands.rounds_on_cpu else 4
        groups = list(tiles(q_BHLK, num_features=num_features, size=size, spans=spans))
        references, states = [], []
        with no_autocast(v_BHLC):
            for group in groups:
                state, operands.reference_BH1R = (
                    None if x is None else x[:, group[0].heads] for x in entering or (None, None)
                )
                if causal:
                    states += _causal(operands, group, state, write)
                else:
                    states += _bidirectional(operands, group, write)
                references.append(operands.reference_BH1R)
        ctx.weighting, ctx.groups = weighting, groups
        # The projection is saved so that a redraw before the backward pass is an error.
        inputs = q_BHLK, k_BHLK, v_BHLC, mask_BL, feature_map.projection_RK
        ctx.save_for_backward(*inputs, out_BHLC, saved_BHL1, *references, *states)
        return out_BHLC

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (dout_BHLC,) = grad_outputs
        # Accessed once: activation checkpointing does not allow a second access.
        q_BHLK, k_BHLK, v_BHLC, mask_BL, _, out_BHLC, saved_BHL1, *rest = ctx.saved_tensors
        feature_map, normalizer, causal, *_ = ctx.weighting
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL, feature_map, rounds_on_cpu=ctx.rounds)
        references, states = rest[: len(ctx.groups)], rest[len(ctx.groups) :]
        gradients = [torch.zeros_like(x) for x in (q_BHLK, k_BHLK, v_BHLC)]

        def dsums_of(tile: Tile) -> Tensor:
            out = tile.of(out_BHLC).to(operands.dtype)
            dsums = normalizer.gradient(tile.of(dout_BHLC), out, tile.of(saved_BHL1))
            return operands.clear_padding(dsums, tile)

        def write(tile: Tile, number: int, gradient: Tensor) -> None:
            tile.of(gradients[number])[:] = gradient
            # Those of queries are 0 there, as the gradients of their sums are.
            if number > 0:
                operands.clear_padding(tile.of(gradients[number]), tile)

        operands.kept = states if operands.keeps else None
        compute = _causal_gradients if causal else _bidirectional_gradients
        with no_autocast(out_BHLC):
            for group, reference in zip(reversed(ctx.groups), reversed(references), strict=True):
                operands.reference_BH1R = reference
                compute(operands, group, states, dsums_of, write)
        return *gradients, None, None


# With the type that `apply` lacks.
linear_attention: Callable[..., Tensor] = LinearAttentionFunction.apply


def graph_attention(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor, weighting: Weighting
) -> Tensor:
    """Returns what `LinearAttentionFunction` returns, up to rounding, for an exported graph.

    All positions are one tile: a loop over tiles would be that of one length. The states before
    chunks are cumulative sums, so that causal attention is linear in the length there too.
    """
    feature_map, normalizer, causal, *_ = weighting
    operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL, feature_map)
    with no_autocast(v_BHLC):
        if not causal:
            operands.raise_reference(WHOLE)
        phi_k = operands.keys(WHOLE, causal=causal).phi_BHLR
        phi_q = operands.queries(WHOLE).phi_BHLR
        values = zero_padding(F.pad(v_BHLC.to(operands.dtype), (0, 1), value=1.0), mask_BL)
        if causal:
            phi_q, phi_k, values = (chunked(x) for x in (phi_q, phi_k, values))
            # Each state is moved to the next chunk.
            before = F.pad((phi_k.mT @ values).cumsum(dim=2), (0, 0, 0, 0, 1, -1))
            chunks = (phi_q @ phi_k.mT).tril() @ values + phi_q @ before
            sums = from_blocks(chunks, v_BHLC.shape[2])
        else:
            sums = phi_q @ (phi_k.mT @ values)
        out_BHLC, _ = normalizer(sums)
    return zero_padding(out_BHLC, mask_BL).to(v_BHLC.dtype)


def _bidirectional(
    operands: Operands, group: list[Tile], write: Callable[[Tile, Tensor], None]
) -> list[Tensor]:
    state = operands.add_keys(None, group[0])
    for tile in group[1:]:
        state = operands.add_keys(state, tile)
    for tile in group:
        phi = operands.queries(tile).phi_BHLR
        write(tile, product(phi, state, dtype=operands.product_dtype).to(operands.dtype))
    return [*operands.kept_for_backward(), state]


def _bidirectional_gradients(
    operands: Operands,
    group: list[Tile],
    states: list[Tensor],
    dsums_of: Callable[[Tile], Tensor],
    write: _Write,
) -> None:
    """Computes dq and the gradient of the state tile by tile, then dk and dv."""
    multiply = partial(product, dtype=operands.product_dtype)
    state = states.pop()
    dstate = torch.zeros_like(state)
    for tile in group:
        dsums = dsums_of(tile).to(operands.value_dtype)
        phi, pullback = operands.queries(tile)
        columns = dsums.mT if operands.rounds_on_cpu else dsums.mT.contiguous()
        dstate += multiply(columns, phi.mT)
        write(tile, 0, pullback(multiply(dsums, state.mT)))
    for tile in group:
        phi, pullback = operands.keys(tile)
        relative = operands.relative(dstate)
        dvalues, dones = relative[..., :-1, :].to(operands.value_dtype), relative[..., -1, :]
        write(tile, 2, multiply(phi, dvalues))
        write(tile, 1, pullback(multiply(operands.values(tile), dvalues.mT, dones)))


def _within_chunks(operands: Operands) -> Callable[..., Tensor]:
    """Returns the product of weights with values, and of gradients, in float32 on a CPU.

    They are of one value, or 0, where a position sees one key: a rounded result would not be.
    """
    dtype = None if operands.rounds_on_cpu else operands.product_dtype
    return partial(matrix_product, dtype=dtype)


def _causal(
    operands: Operands,
    group: list[Tile],
    entering: Tensor | None,
    write: Callable[[Tile, Tensor], None],
) -> list[Tensor]:
    """Computes the sums of a group; returns the states before its tiles but the first."""
    dtype = operands.product_dtype
    multiply, within = partial(matrix_product, dtype=dtype), _within_chunks(operands)
    prefix, states = States(), []
    prefix.last = entering
    for tile in group:
        # The next tile overwrites it.
        before_tile = [] if prefix.last is None else [prefix.last.clone()]
        phi_k = chunked(operands.keys(tile, causal=True).phi_BHLR)
        phi_q = chunked(operands.queries(tile).phi_BHLR)
        values = chunked(operands.values_and_ones(tile).to(operands.dtype))
        before = prefix.add_products(values.mT, phi_k, dtype=dtype)
        weights = multiply(phi_q, phi_k.mT).tril_()
        sums = within(weights, values, onto=multiply(phi_q, before.mT))
        write(tile, positions(sums, tile))
        states += [*operands.kept_for_backward(), *before_tile]
    return states


def _causal_gradients(
    operands: Operands,
    group: list[Tile],
    states: list[Tensor],
    dsums_of: Callable[[Tile], Tensor],
    write: _Write,
) -> None:
    """Computes the tiles from right to left, carrying the gradient of the state."""
    dtype = operands.product_dtype
    multiply, within = partial(matrix_product, dtype=dtype), _within_chunks(operands)
    prefix, suffix = States(), States(reverse=True)
    for tile in reversed(group):
        prefix.last = states.pop() if tile is not group[0] else None
        phi_q, query_pullback = operands.queries(tile)
        phi_k, key_pullback = operands.keys(tile, causal=True)
        given = phi_q, phi_k, operands.values_and_ones(tile).to(operands.dtype), dsums_of(tile)
        phi_q, phi_k, values, dsums = (chunked(x) for x in given)
        before = prefix.add_products(values.mT, phi_k, dtype=dtype)
        dafter = suffix.add_products(dsums.mT, phi_q, dtype=dtype)
        weights = multiply(phi_q, phi_k.mT).tril_()
        dweights = within(dsums, values.mT).tril_()
        dphi_q = multiply(dweights, phi_k, onto=multiply(dsums, before))
        dphi_k = multiply(dweights.mT, phi_q, onto=multiply(values, dafter))
        dvalues = within(weights.mT, dsums, onto=multiply(phi_k, dafter.mT))
        dphi_q, dphi_k = (positions(x, tile).to(operands.value_dtype) for x in (dphi_q, dphi_k))
        write(tile, 0, query_pullback(dphi_q))
        write(tile, 1, key_pullback(dphi_k))
        write(tile, 2, positions(dvalues, tile)[..., :-1])
