"""A decoding cache of two rings of keys and values: the last positions, and the last summaries."""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor


@final
@dataclass(frozen=True)
class TwoRings:
    """Keys and values in M slots: first those of a window, then groups of `rank` summaries.

    Both rings are part of one tensor, so that one softmax runs over both without a copy.

    Attributes:
        k_BHMK: keys.
        v_BHMC: values.
        window: slots of the first ring.
        rank: summaries of a group.
        groups: groups that the second ring keeps; None for all, with slots added as needed.
        num_positions: positions that were appended in total.
        num_groups: groups that were appended in total.
    """

    k_BHMK: Tensor
    v_BHMC: Tensor
    window: int
    rank: int
    groups: int | None
    num_positions: int = 0
    num_groups: int = 0

    @classmethod
    def empty(
        cls, k_BHK: Tensor, v_BHC: Tensor, *, window: int, rank: int, groups: int | None
    ) -> "TwoRings":
        """Creates empty rings; keys and values give sizes, and values the dtype."""
        slots = window + rank * (1 if groups is None else groups)
        k_BHMK, v_BHMC = (v_BHC.new_zeros(*x.shape[:2], slots, x.shape[2]) for x in (k_BHK, v_BHC))
        return cls(k_BHMK, v_BHMC, window, rank, groups)

    def __getitem__(self, rows_B: Tensor) -> "TwoRings":
        return replace(self, k_BHMK=self.k_BHMK[rows_B], v_BHMC=self.v_BHMC[rows_B])

    def append_position(self, k_BHK: Tensor, v_BHC: Tensor) -> "TwoRings":
        """Writes one position, in place, where the oldest one was."""
        slot = self.num_positions % self.window
        self.k_BHMK[:, :, slot] = k_BHK
        self.v_BHMC[:, :, slot] = v_BHC
        return replace(self, num_positions=self.num_positions + 1)

    def append_group(self, k_BHPK: Tensor, v_BHPC: Tensor) -> "TwoRings":
        """Writes one group of summaries, in place, where the oldest one was."""
        k_BHMK, v_BHMC, number = self.k_BHMK, self.v_BHMC, self.num_groups
        if self.groups is not None:
            number %= self.groups
        start = self.window + number * self.rank
        if start == k_BHMK.shape[2]:
            # Doubling copies every summary about once, however long the sequence becomes.
            k_BHMK, v_BHMC = (F.pad(x, (0, 0, 0, number * self.rank)) for x in (k_BHMK, v_BHMC))
        k_BHMK[:, :, start : start + self.rank] = k_BHPK
        v_BHMC[:, :, start : start + self.rank] = v_BHPC
        return replace(self, k_BHMK=k_BHMK, v_BHMC=v_BHMC, num_groups=self.num_groups + 1)

    def attend(self, q_BHK: Tensor) -> Tensor:
        """Computes softmax(q kᵀ / √K) v over the slots in use, BHC."""
        slot_M = torch.arange(self.k_BHMK.shape[2], device=q_BHK.device)
        groups = self.num_groups if self.groups is None else min(self.num_groups, self.groups)
        in_window_M = slot_M < min(self.num_positions, self.window)
        in_groups_M = (slot_M >= self.window) & (slot_M < self.window + groups * self.rank)
        out_BH1C = F.scaled_dot_product_attention(
            q_BHK[:, :, None].to(self.k_BHMK.dtype),
            self.k_BHMK,
            self.v_BHMC,
            attn_mask=(in_window_M | in_groups_M)[None, None, None],
            scale=1 / math.sqrt(q_BHK.shape[-1]),
        )
        return out_BH1C.squeeze(2)
