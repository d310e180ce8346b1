"""Linear attention over the proteins of a family: a sum for each protein, and no mask.

The state S_p of protein p is the sum of [v | 1]ᵀφ(k) over its keys. A query of protein p reads the
sum of the states of the proteins that it sees: those before its own, and with them its own, or
those after it. Nothing is subtracted: these are prefix and suffix sums over proteins, so that no
protein changes what those before it see. States of exponentials have a reference each, and two are
joined by the larger one of each feature. The cost is that of attention within proteins, and one
state for each of them.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.linearized.features import FeatureMap, Features
from protlm.attention.linearized.normalization import Denominator
from protlm.attention.linearized.positive import ExponentialFeatureMap, exponential, logit_floor
from protlm.attention.ops.numerics import no_autocast
from protlm.attention.ops.products import product


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
    after = [*_running(proteins[::-1], Sums.none(entering.state, entering.reference))][-2::-1]
    return [sums.joined(rest) for sums, rest in zip(before, after, strict=True)], leaving


def _running(proteins: Sequence[Sums], first: Sums) -> Iterator[Sums]:
    return accumulate(proteins, Sums.joined, initial=first)


class ProteinSums(torch.autograd.Function):
    """`apply(k, v, feature_map)` returns the `Sums` of one protein, (1, H, C + 1, R)."""

    @staticmethod
    def forward(
        ctx: Any, k_BHLK: Tensor, v_BHLC: Tensor, feature_map: FeatureMap
    ) -> tuple[Tensor, Tensor | None]:
        ctx.feature_map = feature_map
        # The projection is saved so that a redraw before the backward pass is an error.
        ctx.save_for_backward(k_BHLK, v_BHLC, feature_map.projection_RK)
        with no_autocast(v_BHLC):
            (phi_BHLR, _), reference = _keys(k_BHLK, feature_map)
            state = product(F.pad(v_BHLC, (0, 1), value=1.0).mT, phi_BHLR.mT)
        ctx.mark_non_differentiable(*filter(torch.is_tensor, [reference]))
        return state, reference

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        k_BHLK, v_BHLC, _ = ctx.saved_tensors
        dstate = grad_outputs[0]
        with no_autocast(v_BHLC):
            (phi_BHLR, pullback), _ = _keys(k_BHLK, ctx.feature_map)
            dv_BHLC = product(phi_BHLR, dstate[..., :-1, :])
            dk_BHLK = pullback(product(F.pad(v_BHLC, (0, 1), value=1.0), dstate.mT))
        return dk_BHLK, dv_BHLC, None


def _keys(k_BHLK: Tensor, feature_map: FeatureMap) -> tuple[Features, Tensor | None]:
    """Returns the features of keys, and what they are relative to, or None."""
    if not isinstance(feature_map, ExponentialFeatureMap):
        return feature_map.keys(k_BHLK), None
    logits = feature_map.key_logits(k_BHLK)
    reference = logits.amax(dim=-2, keepdim=True)
    phi_BHLR = logits.sub_(reference).exp2_()
    return exponential(phi_BHLR, partial(feature_map.key_pullback, k_BHLK=k_BHLK)), reference


class ReadSums(torch.autograd.Function):
    """`apply(q, state, reference, feature_map, normalizer)` returns what queries read, 1HLC."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHLK: Tensor,
        state: Tensor,
        reference: Tensor | None,
        feature_map: FeatureMap,
        normalizer: Denominator,
    ) -> Tensor:
        with no_autocast(q_BHLK):
            phi_BHLR, _ = feature_map.queries(q_BHLK, reference)
            out_BHLC, saved_BHL1 = normalizer(product(phi_BHLR, state))
        ctx.feature_map, ctx.normalizer = feature_map, normalizer
        ctx.save_for_backward(
            q_BHLK, state, reference, out_BHLC, saved_BHL1, feature_map.projection_RK
        )
        return out_BHLC

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        q_BHLK, state, reference, out_BHLC, saved_BHL1, _ = ctx.saved_tensors
        with no_autocast(q_BHLK):
            phi_BHLR, pullback = ctx.feature_map.queries(q_BHLK, reference)
            dsums = ctx.normalizer.gradient(grad_outputs[0], out_BHLC, saved_BHL1)
            dstate = product(dsums.mT, phi_BHLR.mT)
            dq_BHLK = pullback(product(dsums, state.mT))
        return dq_BHLK, dstate, None, None, None
