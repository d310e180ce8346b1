"""Attention over families: packed proteins that see each other (docs/relatives.md).

In a layer of the family, a protein sees its own keys and those of its relatives: of all of them
(`full`), or of those before it (`ordered`), so that what a context is does not depend on what
follows it. One normalization is over both (`joint`), or each has its own, and the relatives' is
added through a factor of each head (`apart`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protlm.attention.base import Attention, Context, Recurrent, State
from protlm.bounds import Bounds


class View(NamedTuple):
    """What the proteins of a family see of each other.

    Attributes:
        bounds: those of proteins and families.
        later: whether a protein sees those after it, too.
        factor_H: what the mean over relatives is multiplied by, where it is apart; None: joint.
        entering: what a context has left that was read before, which every family of the rows
            sees; without gradients.
        keeps: whether the state after the proteins, which are of one family, is asked for.
    """

    bounds: Bounds
    later: bool
    factor_H: Tensor | None = None
    entering: Any = None
    keeps: bool = False


class SeesRelatives(Attention):
    """A mechanism whose proteins may see their relatives.

    The states of contexts are those of `Recurrent`, and have one sample.
    """

    # Whether it sees relatives at all, and if so, apart; an instance may override it.
    sees_relatives: bool = True
    sums_apart: bool = True

    def relatives_refusal(self, *, later: bool, apart: bool, runs: bool) -> str:
        """Returns why proteins cannot see their relatives so, or "".

        Args:
            later: they see those after them, too.
            apart: with a normalization of their own.
            runs: positions in layers of the family do not restart.
        """
        return ""

    def forward_family(
        self, heads: Sequence[Tensor], context: Context, view: View
    ) -> tuple[Tensor, State | None]:
        """Returns the mixed values of packed families, BHLC, and the state after them if kept."""
        if view.factor_H is not None:
            own_BHLC = self(*heads, context, view.bounds)
            others_BHLC, state = self.across(heads, context, view, own=False)
            return own_BHLC + view.factor_H.to(own_BHLC.dtype)[:, None, None] * others_BHLC, state
        is_plain = context.causal and view.entering is None and not view.keeps
        if view.later or is_plain:
            return self(*heads, context, view.bounds.families), None
        return self.across(heads, context, view, own=True)

    @abstractmethod
    def across(
        self, heads: Sequence[Tensor], context: Context, view: View, *, own: bool
    ) -> tuple[Tensor, State | None]:
        """Mixes values over relatives, and with `own` over the own protein, in one normalization.

        Only the own protein is causal. A query without keys has 0. Also returns the state.
        """

    def family_rows(
        self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, view: View, rows: slice
    ) -> Tensor:
        """Returns some rows of the map of one family, of its last protein and all keys, BHML."""

        def mix(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
            return self.forward_family((q_BHLK, k_BHLK, v_BHLC), context, view)[0]

        if view.factor_H is None:
            # The last protein sees the whole row, in either order.
            return self.map_rows(q_BHLK, k_BHLK, context, rows)
        return self._rows_by_gradient(mix, q_BHLK, k_BHLK, context, rows)

    def entered(self, state: Any, k_BHK: Tensor, v_BHC: Tensor, *, apart: bool) -> Any:
        """Returns the state from which the next proteins of a family are stepped through.

        Keys and values give sizes and dtypes. A protein apart from its relatives begins anew.
        """
        if apart:
            assert isinstance(self, Recurrent)
            return self.initial_state(k_BHK, v_BHC)
        return state[k_BHK.new_zeros(len(k_BHK), dtype=torch.int64)]
