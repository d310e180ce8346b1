"""Linear attention over the proteins of a family: a sum for each protein, and no mask.

The state S_p of protein p is the sum of [v | 1]ᵀφ(k) over its keys. A query of protein p reads the
sum of the states of the proteins that it sees: those before its own, and with them its own, or
those after it. Nothing is subtracted: these are prefix and suffix sums over proteins, so that no
protein changes what those before it see. States of exponentials have a reference each, and two are
joined by the larger one of each feature. The cost is that of attention within proteins, and one
state for each of them.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.linearized.features import FeatureMap
from protlm.attention.linearized.function import (
    Weighting,
    key_gradients,
    query_gradients,
    read_state,
    sum_keys,
)
from protlm.attention.linearized.normalization import Denominator
from protlm.attention.linearized.operands import Operands
from protlm.attention.linearized.positive import ExponentialFeatureMap, logit_floor
from protlm.attention.linearized.tiles import Tile, tiles
from protlm.attention.ops.numerics import no_autocast
from protlm.bounds import Spans

# The number of a protein, some heads, and the tiles of both.
_Group: TypeAlias = tuple[int, slice, list[Tile]]


class Sums(NamedTuple):
    """States (..., C + 1, R), and the logits that they are relative to, (..., 1, R), or None."""

    state: Tensor
    reference: Tensor | None

    @classmethod
    def none(cls, state: Tensor, reference: Tensor | None) -> "Sums":
        """Returns those of no keys, of the sizes of others."""
        if reference is None:
            return cls(torch.zeros_like(state), None)
        return cls(
            torch.zeros_like(state), torch.full_like(reference, logit_floor(reference.dtype))
        )

    def joined(self, other: "Sums") -> "Sums":
        """Returns the sum of two; references have no gradient."""
        if self.reference is None or other.reference is None:
            return Sums(self.state + other.state, None)
        highest = torch.maximum(self.reference, other.reference)
        own = self.state * (self.reference - highest).exp2()
        return Sums(torch.addcmul(own, other.state, (other.reference - highest).exp2()), highest)


def seen(
    proteins: Sequence[Sums], entering: Sums, *, own: bool, later: bool
) -> tuple[list[Sums], Sums]:
    """Returns the sum that each protein of a family sees, and that of all that they leave."""
    *before, leaving = _running(proteins, entering)
    if own:
        return [sums.joined(one) for sums, one in zip(before, proteins, strict=True)], leaving
    if not later:
        return before, leaving
    nothing = Sums.none(entering.state, entering.reference)
    after = [*_running(proteins[::-1], nothing)][-2::-1]
    return [sums.joined(rest) for sums, rest in zip(before, after, strict=True)], leaving


def _running(proteins: Sequence[Sums], first: Sums) -> Iterator[Sums]:
    return accumulate(proteins, Sums.joined, initial=first)


def protein_sums(
    k_BHLK: Tensor, v_BHLC: Tensor, feature_map: FeatureMap, spans: Spans
) -> list[Sums]:
    """Returns the state of each protein of joined rows, (H, C + 1, R)."""
    state, reference = _ProteinSums.apply(k_BHLK, v_BHLC, feature_map, spans)  # pyright: ignore[reportGeneralTypeIssues]
    if reference is None:
        return [Sums(one, None) for one in state.unbind()]
    return [Sums(*both) for both in zip(state.unbind(), reference.unbind(), strict=True)]


def read(
    q_BHLK: Tensor,
    v_BHLC: Tensor,
    proteins: Sequence[Sums],
    feature_map: FeatureMap,
    normalizer: Denominator,
    spans: Spans,
) -> Tensor:
    """Returns what the queries of each protein read from its sums, BHLC; 0 outside of spans.

    Values, which have no gradient here, give the width and the dtype.
    """
    states = torch.stack([one.state for one in proteins])
    references = [one.reference for one in proteins if one.reference is not None]
    reference = torch.stack(references) if references else None
    weighting = Weighting(feature_map, normalizer, False, spans)
    out = _Read.apply(q_BHLK, states, v_BHLC.detach(), reference, weighting)
    assert isinstance(out, Tensor)
    return out


def _groups(x_BHLK: Tensor, feature_map: FeatureMap, spans: Spans) -> list[_Group]:
    """Returns the tiles of each protein, and where its states of their heads are."""
    number_of = {start: number for number, (start, _) in enumerate(spans.tolist())}
    size = feature_map.num_features(x_BHLK.shape[-1])
    groups = tiles(x_BHLK, num_features=size, spans=spans)
    return [(number_of[some[0].rows.start], some[0].heads, some) for some in groups]


class _ProteinSums(torch.autograd.Function):
    """`apply(k, v, feature_map, spans)` returns states (S, H, C + 1, R) and references, or None."""

    @staticmethod
    def forward(
        ctx: Any, k_BHLK: Tensor, v_BHLC: Tensor, feature_map: FeatureMap, spans: Spans
    ) -> tuple[Tensor, Tensor | None]:
        operands = _operands(k_BHLK, k_BHLK, v_BHLC, feature_map)
        num_features = feature_map.num_features(k_BHLK.shape[-1])
        shape = len(spans), k_BHLK.shape[1], v_BHLC.shape[-1] + 1, num_features
        states = k_BHLK.new_empty(shape, dtype=operands.dtype)
        reference = torch.empty_like(states[:, :, :1])
        ctx.groups, ctx.feature_map = _groups(k_BHLK, feature_map, spans), feature_map
        with no_autocast(v_BHLC):
            for number, heads, group in ctx.groups:
                operands.reference_BH1R = None
                states[number, heads] = sum_keys(operands, group)[0]
                if operands.reference_BH1R is not None:
                    reference[number, heads] = operands.reference_BH1R[0]
        found = reference if isinstance(feature_map, ExponentialFeatureMap) else None
        # The projection is saved so that a redraw before the backward pass is an error.
        ctx.save_for_backward(k_BHLK, v_BHLC, found, feature_map.projection_RK)
        ctx.mark_non_differentiable(*filter(torch.is_tensor, [found]))
        return states, found

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        k_BHLK, v_BHLC, reference, _ = ctx.saved_tensors
        operands = _operands(k_BHLK, k_BHLK, v_BHLC, ctx.feature_map)
        gradients = [torch.zeros_like(k_BHLK), torch.zeros_like(v_BHLC)]

        def write(tile: Tile, number: int, gradient: Tensor) -> None:
            tile.of(gradients[number - 1])[:] = gradient

        with no_autocast(v_BHLC):
            for number, heads, group in ctx.groups:
                if reference is not None:
                    operands.reference_BH1R = reference[None, number, heads]
                key_gradients(operands, group, grad_outputs[0][None, number, heads], write)
        return *gradients, None, None


class _Read(torch.autograd.Function):
    """`apply(q, states, v, references, weighting)` returns the output."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHLK: Tensor,
        states: Tensor,
        v_BHLC: Tensor,
        reference: Tensor | None,
        weighting: Weighting,
    ) -> Tensor:
        feature_map, normalizer, _, spans, _ = weighting
        assert spans is not None
        operands = _operands(q_BHLK, q_BHLK, v_BHLC, feature_map)
        out_BHLC = torch.zeros_like(v_BHLC)
        saved_BHL1 = torch.empty_like(v_BHLC[..., :1], dtype=operands.dtype)

        def write(tile: Tile, sums: Tensor) -> None:
            tile.of(out_BHLC)[:], tile.of(saved_BHL1)[:] = normalizer(sums)

        ctx.groups = _groups(q_BHLK, feature_map, spans)
        with no_autocast(v_BHLC):
            for number, heads, group in ctx.groups:
                if reference is not None:
                    operands.reference_BH1R = reference[None, number, heads]
                read_state(operands, group, states[None, number, heads], write)
        ctx.feature_map, ctx.normalizer = feature_map, normalizer
        saved = q_BHLK, states, v_BHLC, reference, out_BHLC, saved_BHL1
        ctx.save_for_backward(*saved, feature_map.projection_RK)
        return out_BHLC

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        q_BHLK, states, v_BHLC, reference, out_BHLC, saved_BHL1, _ = ctx.saved_tensors
        operands = _operands(q_BHLK, q_BHLK, v_BHLC, ctx.feature_map)
        dq_BHLK, dstates = torch.zeros_like(q_BHLK), torch.empty_like(states)

        def dsums_of(tile: Tile) -> Tensor:
            out = tile.of(out_BHLC).to(operands.dtype)
            return ctx.normalizer.gradient(tile.of(grad_outputs[0]), out, tile.of(saved_BHL1))

        def write(tile: Tile, number: int, gradient: Tensor) -> None:
            tile.of(dq_BHLK)[:] = gradient

        with no_autocast(out_BHLC):
            for number, heads, group in ctx.groups:
                if reference is not None:
                    operands.reference_BH1R = reference[None, number, heads]
                state = states[None, number, heads]
                dstates[number, heads] = query_gradients(operands, group, state, dsums_of, write)[0]
        return dq_BHLK, dstates, *[None] * 3


def _operands(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, feature_map: FeatureMap) -> Operands:
    """Returns the operands of spans, which have no padding."""
    mask_1L = torch.ones(1, q_BHLK.shape[2], dtype=torch.bool, device=q_BHLK.device)
    return Operands(q_BHLK, k_BHLK, v_BHLC, mask_1L, feature_map)
