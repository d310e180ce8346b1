"""Step-by-step form of the mechanisms whose position biases are 0 outside a window."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from protlm.attention.aft.base import AttentionFree
from protlm.attention.aft.sums import SoftmaxSums, floor_of
from protlm.attention.base import Recurrent
from protlm.attention.ops.numerics import no_autocast, upcast


@final
@dataclass(frozen=True)
class WindowedState:
    """Exponents and values of the last positions, in rings, and the sums over all before them."""

    exponents: Tensor
    values: Tensor
    far: SoftmaxSums
    length: int

    def __getitem__(self, rows_B: Tensor) -> "WindowedState":
        return WindowedState(
            self.exponents[rows_B], self.values[rows_B], self.far[rows_B], self.length
        )

    def append(self, exponents: Tensor, values: Tensor) -> "WindowedState":
        """Writes one position, in place, over the oldest one, which becomes part of the sums."""
        far, slot = self.far, self.length % self.values.shape[2]
        if self.length >= self.values.shape[2]:
            oldest = self.exponents[:, :, slot]
            far = far.plus(SoftmaxSums(oldest, self.values[:, :, slot], torch.ones_like(oldest)))
        self.exponents[:, :, slot] = exponents
        self.values[:, :, slot] = values
        return replace(self, far=far, length=self.length + 1)


class WindowedAttentionFree(AttentionFree, Recurrent[WindowedState]):
    """An attention-free transformer whose w_ij is 0 where j is outside the window of i.

    Decoding keeps the positions of one causal window, and two sums over everything before it.
    """

    # Positions of a causal window, the row's own one included.
    _window: int

    @abstractmethod
    def _window_bias(self, row: int, key_M: Tensor) -> Tensor:
        """Returns w of one row and M keys in its window, (H or 1, M)."""

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> WindowedState:
        exponents, values = self._exponents(upcast(k_BHK)), upcast(v_BHC)

        def ring(x: Tensor, value: float) -> Tensor:
            return x.new_full((*x.shape[:2], self._window, x.shape[2]), value)

        return WindowedState(
            ring(exponents, floor_of(exponents)),
            ring(values, 0.0),
            SoftmaxSums.none(exponents, values),
            length=0,
        )

    @torch.no_grad()
    def step(
        self,
        state: WindowedState,
        q_BHK: Tensor,
        k_BHK: Tensor,
        v_BHC: Tensor,
        *,
        hidden_BD: Tensor,
    ) -> tuple[WindowedState, Tensor]:
        row = state.length
        self._refuse_longer(row + 1)
        with no_autocast(v_BHC):
            state = state.append(self._exponents(upcast(k_BHK)), upcast(v_BHC))
            slot_M = torch.arange(self._window, device=k_BHK.device)
            # The position in every slot; one that is still empty has the exponent of no weight.
            key_M = (row - (row - slot_M).remainder(self._window)).clamp(min=0)
            exponents = state.exponents + self._window_bias(row, key_M)[..., None]
            near = SoftmaxSums.terms(exponents, state.values).total().each(lambda x: x.squeeze(-2))
            gate_BHK = upcast(q_BHK).sigmoid()
            return state, (gate_BHK * state.far.plus(near).mean()).to(v_BHC.dtype)
