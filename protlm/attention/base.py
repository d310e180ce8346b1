"""The contract of an attention mechanism: it mixes value vectors across positions."""

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn


class Attention(nn.Module, ABC):
    """Mixes value vectors across positions, one head at a time.

    A mechanism is one module `protlm/attention/NAME.py` that defines one subclass, and one file
    `conf/attention/NAME.yaml` with its name and the constructor's keyword arguments. The
    constructor may also ask, by these names, for `num_heads`, `head_dim`, `model_dim`,
    `max_length` and `seed`; they come from the model.
    """

    supports_bidirectional: ClassVar[bool]
    supports_causal: ClassVar[bool]
    shares_query_key: ClassVar[bool] = False

    @abstractmethod
    def forward(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        *,
        hidden_BLD: Tensor,
        mask_BL: Tensor,
        causal: bool,
    ) -> Tensor:
        """Returns the mixed values, BHLC, in the dtype of `v_BHLC`.

        Args:
            q_BHLK: queries, rotary positions already applied, not yet scaled.
            k_BHLK: keys, likewise.
            v_BHLC: values.
            hidden_BLD: the block's normalised input, for mechanisms with gates or projections.
            mask_BL: true where there is a residue or special token to attend to. Nothing at the
                other positions, not even NaN, reaches an output at a true position; outputs
                there are 0, and a row that may attend to nothing is 0.
            causal: whether position i sees only positions up to and including i.
        """

    def attention_map(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        *,
        hidden_BLD: Tensor,
        mask_BL: Tensor,
        causal: bool,
        rows: slice | None = None,
    ) -> Tensor:
        """Returns the map, BHLL, or a block of its rows: entry (i, j) weighs value j in output i.

        The default feeds the identity as values, which is exact for every mechanism that is
        linear in its values (arXiv 2009.14794, C.4). It costs as much as the whole map for any
        block of rows; mechanisms with a cheaper exact form override it.
        """
        batch, heads, length, _ = q_BHLK.shape
        identity_LL = torch.eye(length, dtype=q_BHLK.dtype, device=q_BHLK.device)
        map_BHLL = self.forward(
            q_BHLK,
            k_BHLK,
            identity_LL.expand(batch, heads, length, length),
            hidden_BLD=hidden_BLD,
            mask_BL=mask_BL,
            causal=causal,
        )
        return map_BHLL if rows is None else map_BHLL[:, :, rows]


class RandomFeatures(ABC):
    """A mechanism with random projections, redrawn outside `forward`.

    `redraw_every` counts optimiser steps; None keeps the first draw.
    """

    redraw_every: int | None

    @abstractmethod
    def redraw(self, index: int) -> None:
        """Draws the projections number `index`, a pure function of (seed, index), in place."""


class State(Protocol):
    """What a mechanism keeps of the positions it has seen: a tensor, or a record of tensors."""

    def __getitem__(self, rows_B: Tensor, /) -> Self:
        """A copy of some samples' state, by their numbers (int64); one may come several times."""
        ...


StateT = TypeVar("StateT", bound=State)


class Recurrent(ABC, Generic[StateT]):
    """A causal mechanism that can take one position after the other.

    Stepping through a sequence gives the outputs of `forward` with `causal=True` on the whole of
    it. The state of a linear mechanism has a constant size. The first axis of a state's tensors
    counts samples, so that finished sequences can leave a batch: `state[rows_B]`.
    """

    @abstractmethod
    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> StateT:
        """The state before the first position; keys and values give sizes, dtype and device."""

    @abstractmethod
    def step(
        self, state: StateT, q_BHK: Tensor, k_BHK: Tensor, v_BHC: Tensor, *, hidden_BD: Tensor
    ) -> tuple[StateT, Tensor]:
        """Takes the next position of every sample; the arguments are as in `Attention.forward`.

        Returns:
            The state after the position, and the mixed values, BHC, in the dtype of `v_BHC`. The
            state that came in is used up: its memory may have been written to.
        """
