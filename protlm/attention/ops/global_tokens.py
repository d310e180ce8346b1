"""Global positions: the first ones of every sample, and residues chosen by their numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from protlm.system.errors import OptionError


def check_residue_numbers(numbers: Sequence[object] | None) -> tuple[int, ...]:
    """Returns the numbers of `global_positions` in ascending order, each once."""
    if wrong := [x for x in numbers or () if type(x) is not int or x < 1]:
        raise OptionError(
            lambda at: (
                f"{at}global_positions contains {wrong[0]!r}, but residues are numbered from 1; "
                f"type for instance {at}global_positions=[57,102,195], or {at}num_global=1 for "
                "<cls>"
            )
        )
    return tuple(sorted({x for x in numbers or () if isinstance(x, int)}))


def global_mask(mask_BL: Tensor, num_first: int, residues: Sequence[int]) -> Tensor:
    """Returns where the global positions of every sample are, as a mask BL.

    They are the first `num_first` true positions, and those that come `residues` positions after
    the first one: with `<cls>` in front, these are residue numbers.
    """
    number_BL = mask_BL.cumsum(dim=1) - 1
    chosen_BL = number_BL < num_first
    for residue in residues:
        chosen_BL = chosen_BL | (number_BL == residue)
    return chosen_BL & mask_BL


@final
@dataclass(frozen=True)
class GlobalTokens:
    """The indices of P global positions of every sample, in ascending order.

    A sample that has fewer is filled up with other positions, where `exists_BP` is false.
    """

    position_BP: Tensor
    exists_BP: Tensor
    is_global_BL: Tensor

    @classmethod
    def of(cls, is_global_BL: Tensor, number: int) -> "GlobalTokens":
        """Finds the positions of a mask; no sample has more than `number` of them."""
        # A stable sort, because another order would make sums differ between two runs.
        position_BP = (~is_global_BL).byte().argsort(dim=1, stable=True)[:, :number]
        return cls(position_BP, is_global_BL.gather(1, position_BP), is_global_BL)

    def take(self, x_BHLK: Tensor) -> Tensor:
        return x_BHLK.take_along_dim(self.position_BP[:, None, :, None], dim=2)

    def put(self, x_BHLK: Tensor, rows_BHPK: Tensor) -> Tensor:
        """Returns a copy of a tensor with other rows at the global positions, BHLK."""
        index = self.position_BP[:, None, :, None].expand_as(rows_BHPK)
        changed_BHLK = x_BHLK.scatter(2, index, rows_BHPK)
        return torch.where(self.is_global_BL[:, None, :, None], changed_BHLK, x_BHLK)

    def seen(self, *, causal: bool) -> Tensor:
        """Returns which rows see the P positions, BLP: all or, causal, those not before them."""
        seen_BLP = self.exists_BP[:, None].expand(-1, self.is_global_BL.shape[1], -1)
        if causal:
            position_L1 = torch.arange(seen_BLP.shape[1], device=seen_BLP.device)[:, None]
            seen_BLP = seen_BLP & (self.position_BP[:, None] <= position_L1)
        return seen_BLP

    def visible(self, mask_BL: Tensor, *, causal: bool) -> Tensor:
        """Returns which positions the P rows see, BPL: all or, causal, those up to theirs."""
        visible_BPL = mask_BL[:, None] & self.exists_BP[..., None]
        if causal:
            position_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
            visible_BPL = visible_BPL & (position_L <= self.position_BP[..., None])
        return visible_BPL
