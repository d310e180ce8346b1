"""Exact softmax in a sliding window, without global tokens (arXiv 2004.05150, section 3.1)."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor

from protlm.attention.base import Attention, Context, Recurrent, even
from protlm.attention.ops.blocks import Window, window_softmax
from protlm.attention.ops.key_value_cache import KeyValueCache
from protlm.attention.ops.numerics import softmax_weights, visible_keys, zero_padding
from protlm.attention.ops.varlen import varlen_softmax
from protlm.bounds import Bounds
from protlm.config.fields import at_least


@final
class SlidingWindow(Attention, Recurrent[KeyValueCache]):
    """Exact softmax in a sliding window, in every head.

        out_i = Σ_{j ∈ W(i)} exp(q_i·k_j / √K) v_j / Σ_{j ∈ W(i)} exp(q_i·k_j / √K)

    The window W(i) is i and the w/2 positions on either side of it (w = `window`) or, in causal
    mode, i and the w positions before it; positions are indices in the tensor. What is farther away
    is seen through other layers only: n layers of windows reach n w/2 positions.
    """

    is_linear: ClassVar[bool] = False
    rounded_by_autocast: ClassVar[bool] = True
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

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> KeyValueCache:
        return KeyValueCache.empty(k_BHK, v_BHC, self.window + 1)

    def step(
        self,
        state: KeyValueCache,
        q_BHK: Tensor,
        k_BHK: Tensor,
        v_BHC: Tensor,
        context: Context,
    ) -> tuple[KeyValueCache, Tensor]:
        state = state.append(k_BHK, v_BHC, slot=state.ring_slot())
        return state, state.attend(q_BHK)
