"""Hybrid heads: exact softmax in a window in some, a linear mechanism over everything in others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, final

import torch
from torch import Tensor

from protlm.attention import create, mechanism, names
from protlm.attention.base import Attention, Context, Recurrent, State, StateParts, even
from protlm.attention.relatives import SeesRelatives, View
from protlm.bounds import Bounds
from protlm.config.fields import at_least
from protlm.system.errors import OptionError, UserError, one_of

_LINEAR = "performer_relu"


@final
@dataclass(frozen=True)
class HybridState(StateParts):
    """The last positions, for heads with windows, and the state of the linear mechanism.

    A context leaves the keys of windows that see what is aligned, in place of positions, or none.
    """

    window: State | None
    linear: State


@final
class Hybrid(SeesRelatives, Recurrent[HybridState]):
    """Exact softmax in a sliding window in some heads, a linear mechanism in the others.

        out_i = Σ_{j ∈ W(i)} exp(q_i·k_j / √K) v_j / Σ_{j ∈ W(i)} exp(q_i·k_j / √K)

    in the first `local_heads` heads, where the window W(i) is i and the w/2 positions on either
    side of it or, in causal mode, i and the w positions before it; positions are indices in the
    tensor. The linear mechanism computes the other heads by its own equation. The Performer
    released by lucidrains (performer-pytorch, `local_attn_heads`) mixes heads in the same way, but
    its windows are blocks and their neighbors; here every position has a window of the same size
    (Beltagy et al., arXiv 2004.05150, section 3.1).

    Rotary positions are applied to all heads, because the windows need them, even where the
    mechanism alone would not get them. `model.qk_norm=true` normalizes the heads with windows as
    those of softmax, and the others as the mechanism requires.
    """

    exports = True
    is_linear: ClassVar[bool] = False
    rounded_by_autocast: ClassVar[bool] = True
    cost: ClassVar[str] = "L window K; in the other heads that of the linear mechanism"
    advice: ClassVar[str] = "long proteins: exact weights nearby and a map over all pairs"
    map_meaning: ClassVar[str] = (
        "the weight of value j in output i; in the other heads as in the linear mechanism"
    )

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        max_length: int,
        local_heads: int = 1,
        window: Annotated[int, even(2)] = 256,
        relatives_window: Annotated[int | None, at_least(0)] = None,
        mechanism: str = _LINEAR,
        options: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if num_heads < 2:
            raise UserError(
                f"hybrid needs two heads or more, not model.num_heads={num_heads}; choose another "
                "attention, or model.num_heads=2"
            )
        if not 1 <= local_heads < num_heads:
            raise OptionError(
                f"local_heads={local_heads} must leave a head of either kind: between 1 "
                f"and {num_heads - 1} of the {num_heads} heads (model.num_heads)"
            )
        self.local_heads = self.num_exact_heads = local_heads
        sizes = {
            "num_heads": num_heads - local_heads,
            "head_dim": head_dim,
            "model_dim": model_dim,
            "max_length": max_length,
            "seed": seed,
        }
        of_window = {"window": window, "relatives_window": relatives_window}
        near = create("window", of_window, **sizes | {"num_heads": local_heads})
        assert isinstance(near, SeesRelatives)
        self.near, self.linear = near, _create_linear(mechanism, options or {}, sizes)
        self.supports_bidirectional = self.linear.supports_bidirectional
        self.supports_causal = self.linear.supports_causal
        self.max_length = self.linear.max_length
        self.qk_norm = self.linear.qk_norm
        self.exports = self.linear.exports

    @classmethod
    def stored_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        linear = mechanism(options.get("mechanism", _LINEAR))
        nested = options.get("options")
        return {**options, "options": linear.stored_options(nested)} if nested else dict(options)

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        return self.forward_packed((q_BHLK, k_BHLK, v_BHLC), context, None)

    def forward_packed(
        self, heads: Sequence[Tensor], context: Context, bounds: Bounds | None
    ) -> Tensor:
        local, others = zip(*map(self._split, heads), strict=True)
        near = self.near(*local, context, bounds)
        far = self.linear(*others, context, bounds)
        return torch.cat([near, far], dim=1)

    def relatives_refusal(self, *, later: bool, apart: bool, runs: bool) -> str:
        if refusal := self.near.relatives_refusal(later=later, apart=apart, runs=runs):
            return refusal
        if isinstance(self.linear, SeesRelatives):
            return self.linear.relatives_refusal(later=later, apart=apart, runs=runs)
        return f"the linear heads, of {type(self.linear).__name__}, cannot see relatives"

    def forward_family(
        self, heads: Sequence[Tensor], context: Context, view: View
    ) -> tuple[Tensor, HybridState | None]:
        """The linear heads see the family; windows see the protein, or what is aligned to it."""
        local, others = zip(*map(self._split, heads), strict=True)
        entering = None if view.entering is None else view.entering.window
        near, window = self.near.forward_family(local, context, view._replace(entering=entering))
        far, state = self._far.forward_family(others, context, self._of_linear(view))
        return torch.cat([near, far], dim=1), None if state is None else HybridState(window, state)

    def family_rows(
        self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, view: View, rows: slice
    ) -> Tensor:
        (near_q, far_q), (near_k, far_k) = self._split(q_BHLK), self._split(k_BHLK)
        near = self.near.family_rows(near_q, near_k, context, view, rows)
        far = self._far.family_rows(far_q, far_k, context, self._of_linear(view), rows)
        return torch.cat([near, far.to(near.dtype)], dim=1)

    def across(
        self, heads: Sequence[Tensor], context: Context, view: View, *, own: bool
    ) -> tuple[Tensor, None]:
        assert not own, "windows and linear heads are apart from each other"
        local, others = zip(*map(self._split, heads), strict=True)
        far, _ = self._far.across(others, context, self._of_linear(view), own=own)
        return torch.cat([torch.zeros_like(local[2]), far], dim=1), None

    @property
    def _far(self) -> SeesRelatives:
        assert isinstance(self.linear, SeesRelatives)
        return self.linear

    def _of_linear(self, view: View) -> View:
        return view._replace(
            factor_H=None if view.factor_H is None else view.factor_H[self.local_heads :],
            entering=None if view.entering is None else view.entering.linear,
        )

    def entered(
        self, state: HybridState, k_BHK: Tensor, v_BHC: Tensor, *, apart: bool
    ) -> HybridState:
        (near_k, far_k), (near_v, far_v) = self._split(k_BHK), self._split(v_BHC)
        window = self.near.entered(state.window, near_k, near_v, apart=apart)
        return HybridState(window, self._far.entered(state.linear, far_k, far_v, apart=apart))

    def map_rows(self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, rows: slice) -> Tensor:
        (near_q, far_q), (near_k, far_k) = self._split(q_BHLK), self._split(k_BHLK)
        near = self.near.map_rows(near_q, near_k, context, rows)
        far = self.linear.map_rows(far_q, far_k, context, rows)
        return torch.cat([near, far.to(near.dtype)], dim=1)

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> HybridState:
        (near_k, far_k), (near_v, far_v) = self._split(k_BHK), self._split(v_BHC)
        return HybridState(
            _recurrent(self.near).initial_state(near_k, near_v),
            _recurrent(self.linear).initial_state(far_k, far_v),
        )

    def step(
        self, state: HybridState, q_BHK: Tensor, k_BHK: Tensor, v_BHC: Tensor, context: Context
    ) -> tuple[HybridState, Tensor]:
        (near_q, far_q), (near_k, far_k), (near_v, far_v) = map(self._split, (q_BHK, k_BHK, v_BHC))
        far = _recurrent(self.linear)
        near = _recurrent(self.near)
        window, near_out = near.step(state.window, near_q, near_k, near_v, context)
        linear, far_out = far.step(state.linear, far_q, far_k, far_v, context)
        return HybridState(window, linear), torch.cat([near_out, far_out], dim=1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Splits the heads into those with windows and the others."""
        return x[:, : self.local_heads], x[:, self.local_heads :]


def _recurrent(part: Attention) -> Recurrent[Any]:
    assert isinstance(part, Recurrent)
    return part


def _is_linear(name: str) -> bool:
    kind = mechanism(name)
    return kind.is_linear and issubclass(kind, Recurrent)


def _create_linear(name: str, options: Mapping[str, Any], sizes: Mapping[str, int]) -> Attention:
    """Builds the linear mechanism; its options are in the group `options`."""
    if name not in names() or not _is_linear(name):
        allowed = [*filter(_is_linear, names())]
        raise OptionError(
            f"mechanism={name} is not a linear mechanism with a recurrent state; "
            f"there are: {one_of(allowed)}"
        )
    try:
        return create(name, options, **sizes)
    except OptionError as error:
        raise error.within("options") from None
