"""The cache of mechanisms that decode with the keys and values of positions before."""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

# Most slots that are added for positions that come one by one.
_MOST_ROOM = 1024


@final
@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values in M slots, and the number of positions that were appended in total.

    The mechanism chooses the slot of each position: a new one, or that of a position which is no
    longer visible.
    """

    k_BHMK: Tensor
    v_BHMC: Tensor
    length: int = 0

    @classmethod
    def empty(cls, k_BHK: Tensor, v_BHC: Tensor, slots: int) -> "KeyValueCache":
        """Allocates slots, filled with 0; keys and values give sizes and dtypes."""
        k_BHMK, v_BHMC = (x.new_zeros(*x.shape[:2], slots, x.shape[2]) for x in (k_BHK, v_BHC))
        return cls(k_BHMK, v_BHMC)

    def __getitem__(self, rows_B: Tensor) -> "KeyValueCache":
        return replace(self, k_BHMK=self.k_BHMK[rows_B], v_BHMC=self.v_BHMC[rows_B])

    @property
    def slots(self) -> int:
        return self.k_BHMK.shape[2]

    def append(self, k_BHK: Tensor, v_BHC: Tensor, *, slot: int) -> "KeyValueCache":
        """Writes the next position into a slot, in place; adds slots if there is none."""
        # Doubling copies every position about once; after a long context it would double that.
        room = min(self.slots, _MOST_ROOM)
        cache = self.put(k_BHK[:, :, None], v_BHC[:, :, None], slot=slot, room=room)
        return replace(cache, length=self.length + 1)

    def put(self, k_BHPK: Tensor, v_BHPC: Tensor, *, slot: int, room: int) -> "KeyValueCache":
        """Writes P keys and values into slots, in place; adds `room` slots if there are none."""
        k_BHMK, v_BHMC, end = self.k_BHMK, self.v_BHMC, slot + k_BHPK.shape[2]
        if end > self.slots:
            k_BHMK, v_BHMC = (F.pad(x, (0, 0, 0, room)) for x in (k_BHMK, v_BHMC))
        k_BHMK[:, :, slot:end] = k_BHPK
        v_BHMC[:, :, slot:end] = v_BHPC
        return replace(self, k_BHMK=k_BHMK, v_BHMC=v_BHMC)

    def ring_slot(self, first: int = 0) -> int:
        """Returns the slot of the next position, in a ring after the first ones, which stay."""
        if self.length < first:
            return self.length
        return first + (self.length - first) % (self.slots - first)

    def ring_positions(self, first: int = 0) -> Tensor:
        """Returns the position in each slot of `ring_slot`, M; -1 in a slot that is empty."""
        slot_M = torch.arange(self.slots, device=self.k_BHMK.device)
        last = self.length - 1
        ring_M = last - (last - slot_M).remainder(self.slots - first)
        position_M = torch.where(slot_M < first, slot_M, ring_M)
        is_stored_M = (position_M <= last) & ((slot_M < first) | (position_M >= first))
        return position_M.where(is_stored_M, -1)

    def attend(self, q_BHK: Tensor, visible: Tensor | None = None) -> Tensor:
        """Computes softmax(q kᵀ / √K) v over the slots in use, or `visible` ones (M or HM), BHC.

        Numbers in place of what is visible are biases of the slots in use.
        """
        # Until a ring is full, its end is empty. The order of keys does not matter.
        used = self.length if visible is None else visible.shape[-1]
        out_BH1C = F.scaled_dot_product_attention(
            q_BHK[:, :, None].to(self.k_BHMK.dtype),
            self.k_BHMK[:, :, :used],
            self.v_BHMC[:, :, :used],
            attn_mask=None if visible is None else visible.view(1, -1, 1, used),
            scale=1 / math.sqrt(q_BHK.shape[-1]),
        )
        return out_BH1C.squeeze(2).to(self.v_BHMC.dtype)
