"""The contract of an attention mechanism: it mixes value vectors across positions."""

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from protlm.errors import UserError


class Attention(nn.Module, ABC):
    """Mixes value vectors across positions, one head at a time.

    A mechanism is one module `protlm/attention/NAME.py` that defines one subclass, and one file
    `conf/attention/NAME.yaml` with its name and the constructor's keyword arguments. The
    constructor may also ask, by these names, for `num_heads`, `head_dim`, `model_dim`,
    `max_length` and `seed`; they come from the model. The first line of the class's docstring says
    the idea; it stands in `docs/mechanisms.md` with what the class attributes say.
    """

    # Of the class; where settings take a mode away, the instance says so.
    supports_bidirectional: bool
    supports_causal: bool
    # Whether keys are the queries: the model then has no projection of its own for keys.
    shares_query_key: ClassVar[bool] = False
    # Its parameters that activations are multiplied with, as with a linear layer's weight: of all
    # that are not in such a layer, these alone decay.
    matrices: ClassVar[tuple[str, ...]] = ()
    # The time of one head, in the letters of `protlm.shapes` and the options.
    cost: ClassVar[str]
    # When to use it for proteins.
    advice: ClassVar[str]
    # What entry (i, j) of a map is.
    map_meaning: ClassVar[str] = "the weight of value j in output i"
    # The longest input, in positions; None where there is no limit.
    max_length: int | None = None

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

        The default is exact for every mechanism that is linear in its values, and costs memory
        in proportion to the rows: with as many value channels as rows, the gradient that takes
        channel c from output row c alone has the row in value c (the transpose of the map on
        identity values, arXiv 2009.14794, C.4).
        """
        batch, heads, length, _ = q_BHLK.shape
        rows = slice(None) if rows is None else rows
        dtype = torch.promote_types(q_BHLK.dtype, torch.float32)
        # Whoever only looks at maps may have switched gradients off for good: what was made in
        # there has to be copied.
        with torch.inference_mode(False), torch.enable_grad():
            q_BHLK, k_BHLK = (x.detach().clone().to(dtype) for x in (q_BHLK, k_BHLK))
            hidden_BLD, mask_BL = hidden_BLD.detach().clone(), mask_BL.clone()
            positions = torch.arange(length, device=q_BHLK.device)[rows]
            v_BHLM = q_BHLK.new_zeros(batch, heads, length, len(positions)).requires_grad_()
            out_BHLM = self.forward(
                q_BHLK, k_BHLK, v_BHLM, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal
            )
            pick_BHLM = torch.zeros_like(out_BHLM)
            pick_BHLM[:, :, positions, torch.arange(len(positions), device=q_BHLK.device)] = 1
            (map_BHLM,) = torch.autograd.grad(out_BHLM, v_BHLM, pick_BHLM)
        return map_BHLM.mT

    def _refuse_longer(self, length: int) -> None:
        """Refuses an input that is longer than the mechanism's tables.

        Raises:
            UserError: more than `max_length` positions.
        """
        if self.max_length is not None and length > self.max_length:
            raise UserError(
                f"{length} positions are more than the {self.max_length} that this attention has "
                "tables for; use shorter sequences, or a model with a greater model.max_length"
            )


class RandomFeatures(ABC):
    """A mechanism with random projections, redrawn outside `forward`.

    `redraw_every` counts optimiser steps; None keeps the first draw.
    """

    redraw_every: int | None

    @abstractmethod
    def redraw(self, index: int) -> None:
        """Draws the projections number `index`, a pure function of (seed, index), in place."""


class SharesParameters(ABC):
    """A mechanism whose layers may use one set of parameters."""

    @abstractmethod
    def share_with(self, first: Attention) -> None:
        """Makes this layer use the parameters of the first one, where its options ask for it.

        The first layer is of the same class and options.
        """


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
