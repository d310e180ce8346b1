"""Exact softmax in a sliding window, without global tokens (arXiv 2004.05150, section 3.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, final

import torch
from torch import Tensor

from protlm.attention.base import Context, Recurrent, StateParts, even
from protlm.attention.ops.aligned import AlignedKeys, Sight, aligned_softmax, aligned_weights
from protlm.attention.ops.blocks import Window, window_softmax
from protlm.attention.ops.key_value_cache import KeyValueCache
from protlm.attention.ops.numerics import softmax_weights, visible_keys, zero_padding
from protlm.attention.ops.varlen import varlen_softmax
from protlm.attention.relatives import SeesRelatives, View
from protlm.bounds import Bounds
from protlm.config.fields import at_least


@final
@dataclass(frozen=True)
class WindowState(StateParts):
    """The last positions of the protein, and the keys of a context that is seen, if any."""

    own: KeyValueCache
    relatives: AlignedKeys | None = None


@final
class SlidingWindow(SeesRelatives, Recurrent[WindowState]):
    """Exact softmax in a sliding window, in every head.

        out_i = Σ_{j ∈ W(i)} exp(q_i·k_j / √K) v_j / Σ_{j ∈ W(i)} exp(q_i·k_j / √K)

    The window W(i) is i and the w/2 positions on either side of it (w = `window`) or, in causal
    mode, i and the w positions before it; positions are indices in the tensor. What is farther away
    is seen through other layers only: n layers of windows reach n w/2 positions.

    With `relatives_window`, r, a query in a layer of the family also sees, in the same softmax, the
    keys of its relatives within ±r of its own position there. This is exact, and its cost is
    (2r + 1) keys for each relative.
    """

    is_linear: ClassVar[bool] = False
    rounded_by_autocast: ClassVar[bool] = True
    sums_apart = False
    # Whether a query sees its own protein, in a layer of the family.
    sees_own = True
    cost: ClassVar[str] = "L window K"
    exports = True
    advice: ClassVar[str] = "local layers of `alternating`; alone, it does not see distant pairs"

    def __init__(
        self,
        *,
        window: Annotated[int, even(2)] = 256,
        relatives_window: Annotated[int | None, at_least(0)] = None,
    ) -> None:
        super().__init__()
        self.window = window
        self.relatives_window = relatives_window
        self.sees_relatives = relatives_window is not None

    @classmethod
    def of_relatives(cls, around: int) -> Self:
        """Returns one whose queries see nothing but the aligned residues of relatives."""
        made = cls(relatives_window=around)
        made.sees_own = False
        return made

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        return self._mixed((q_BHLK, k_BHLK, v_BHLC), context, context.mask_BL)

    def forward_packed(self, heads: Sequence[Tensor], context: Context, bounds: Bounds) -> Tensor:
        window = Window.of(self.window, causal=context.causal)
        out_BHLC = varlen_softmax(heads, context.mask_BL, bounds, (window.before, window.after))
        if out_BHLC is not None:
            return out_BHLC
        return self._mixed(heads, context, bounds.segment_L[None] + 1)

    def _mixed(self, heads: Sequence[Tensor], context: Context, keys_BL: Tensor) -> Tensor:
        mask_BL, causal = context.mask_BL, context.causal
        q, k, v = (zero_padding(x, mask_BL) for x in heads)
        window = Window.of(self.window, causal=causal)
        return zero_padding(window_softmax(q, k, v, keys_BL=keys_BL, window=window), mask_BL)

    def map_rows(self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, rows: slice) -> Tensor:
        mask_BL, causal = context.mask_BL, context.causal
        position_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
        sees = Window.of(self.window, causal=causal).sees(position_L - position_L[rows, None])
        return softmax_weights(
            zero_padding(q_BHLK, mask_BL)[:, :, rows],
            zero_padding(k_BHLK, mask_BL),
            sees & visible_keys(mask_BL, rows, causal=causal),
        )

    def forward_family(
        self, heads: Sequence[Tensor], context: Context, view: View
    ) -> tuple[Tensor, AlignedKeys | None]:
        """Relatives are in one softmax with the protein, and not apart."""
        if self.relatives_window is None:
            return self(*heads, context, view.bounds), None
        return self.across(heads, context, view, own=True)

    def across(
        self, heads: Sequence[Tensor], context: Context, view: View, *, own: bool
    ) -> tuple[Tensor, AlignedKeys | None]:
        sight, entering = self._sight(context, view, own=own), view.entering
        out_BHLC = aligned_softmax(*heads, bounds=view.bounds, sight=sight, entering=entering)
        if not view.keeps:
            return out_BHLC, None
        before = entering or AlignedKeys.empty(heads[1][:, :, 0], heads[2][:, :, 0])
        return out_BHLC, before.extended(heads[1], heads[2], view.bounds)

    def family_rows(
        self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, view: View, rows: slice
    ) -> Tensor:
        sight, mask_1L = self._sight(context, view), context.mask_BL
        return aligned_weights(
            q_BHLK, k_BHLK, mask_1L=mask_1L, bounds=view.bounds, sight=sight, rows=rows
        )

    def relatives_refusal(self, *, later: bool, apart: bool, runs: bool) -> str:
        if self.relatives_window is None or not runs:
            return ""
        return (
            f"attention.relatives_window={self.relatives_window} is around the same position of "
            "relatives, and with model.relatives_positions=run there is none; type "
            "model.relatives_positions=restart or aligned"
        )

    def entered(self, state: Any, k_BHK: Tensor, v_BHC: Tensor, *, apart: bool) -> WindowState:
        return WindowState(self.initial_state(k_BHK, v_BHC).own, state)

    def _sight(self, context: Context, view: View, *, own: bool = True) -> Sight:
        own = own and self.sees_own
        window = Window.of(self.window, causal=context.causal) if own else None
        # No position is so near.
        around = -1 if self.relatives_window is None else self.relatives_window
        return Sight(window, around, view.later)

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> WindowState:
        return WindowState(KeyValueCache.empty(k_BHK, v_BHC, self.window + 1))

    def step(
        self, state: WindowState, q_BHK: Tensor, k_BHK: Tensor, v_BHC: Tensor, context: Context
    ) -> tuple[WindowState, Tensor]:
        own = state.own.append(k_BHK, v_BHC, slot=state.own.ring_slot())
        after = WindowState(own, state.relatives)
        if state.relatives is None or self.relatives_window is None:
            return after, own.attend(q_BHK)
        return after, state.relatives.step(own, q_BHK, around=self.relatives_window)
