"""Softmax over a sliding window of positions, and what decoding keeps of it."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.blocks import from_blocks, softmax_in_blocks, to_blocks, with_margins
from protlm.attention.precision import full_precision, wide
from protlm.errors import UserError

# With smaller blocks the kernels' products would be too small to be fast.
_SMALLEST_BLOCK = 64


def check_window(window: int) -> None:
    """Refuses a window that has no middle.

    Raises:
        UserError: a number of positions that is odd or below 2.
    """
    if window < 2 or window % 2:
        raise UserError(
            f"attention.window={window} must be even and at least 2: half of the positions lie on "
            "either side; try attention.window=512"
        )


@final
@dataclass(frozen=True)
class Window:
    """The keys that a query sees: offset · dilation positions from its own, -before to after."""

    before: int
    after: int
    dilation: int = 1

    @classmethod
    def of(cls, window: int, *, causal: bool, dilation: int = 1) -> "Window":
        """`window` positions beside the own one: half on either side, or all of them before it."""
        if causal:
            return cls(window, 0, dilation)
        return cls(window // 2, window // 2, dilation)

    def sees(self, offset: Tensor) -> Tensor:
        """Whether a query sees the key that is `offset` positions after it."""
        steps = offset.div(self.dilation, rounding_mode="floor")
        is_step = offset == steps * self.dilation
        return is_step & (steps >= -self.before) & (steps <= self.after)


class SharedKeys(NamedTuple):
    """Keys that every query sees beside its window, in the same softmax; `exists_BP` may hide."""

    k_BHPK: Tensor
    v_BHPC: Tensor
    exists_BP: Tensor

    def of_heads(self, heads: slice) -> "SharedKeys":
        """Those of some heads."""
        return SharedKeys(self.k_BHPK[:, heads], self.v_BHPC[:, heads], self.exists_BP)


def window_softmax(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    *,
    keys_BL: Tensor,
    window: Window,
    shared: SharedKeys | None = None,
) -> Tensor:
    """softmax(q kᵀ / √K) v over the keys of every query's window; time and memory grow with L.

    Args:
        q_BHLK: queries.
        k_BHLK: keys, finite everywhere.
        v_BHLC: values, finite everywhere.
        keys_BL: true where a window may see a key.
        window: the positions that a query sees.
        shared: further keys that all queries see.

    Returns:
        BHLC, in the dtype of the values; 0 for a query that sees no key.
    """
    if window.dilation > 1:
        return _dilated_softmax(q_BHLK, k_BHLK, v_BHLC, keys_BL, window, shared)
    length = q_BHLK.shape[2]
    before, after, size = window.before, window.after, _block_size(length, window)
    if size == length:
        # One block has all the keys there are.
        before = after = 0
    k, v, is_key = (
        with_margins(to_blocks(x, size), before=before, after=after, shared_BHPK=extra)
        for x, extra in (
            (k_BHLK, None if shared is None else shared.k_BHPK),
            (v_BHLC, None if shared is None else shared.v_BHPC),
            (keys_BL[:, None, :, None], None),
        )
    )
    key = torch.arange(-before, size + after, device=q_BHLK.device)
    query_M1 = torch.arange(size, device=q_BHLK.device)[:, None]
    visible = window.sees(key - query_M1) & is_key.mT
    if shared is not None:
        exists = shared.exists_BP[:, None, None, None].expand(*visible.shape[:4], -1)
        visible = torch.cat([exists, visible], dim=-1)
    return from_blocks(softmax_in_blocks(to_blocks(q_BHLK, size), k, v, visible), length)


def _block_size(length: int, window: Window) -> int:
    """Positions in a block: half of what a window sees, or all where that costs no more.

    Smaller blocks would copy every key more often, larger ones weigh more keys that nobody sees.
    """
    reach = window.before + window.after
    size = max(reach // 2, _SMALLEST_BLOCK)
    return length if length <= size + reach else size


def _dilated_softmax(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    keys_BL: Tensor,
    window: Window,
    shared: SharedKeys | None,
) -> Tensor:
    """Every d-th position is a sequence of its own, with a window without gaps."""
    length, dilation = q_BHLK.shape[2], window.dilation
    missing = -length % dilation

    def every_dth(x_BHLK: Tensor) -> Tensor:
        padded = F.pad(x_BHLK, (0, 0, 0, missing)).unflatten(2, (-1, dilation))
        return padded.movedim(3, 1).flatten(0, 1)

    if shared is not None:
        shared = SharedKeys(*(x.repeat_interleave(dilation, dim=0) for x in shared))
    out = window_softmax(
        *(every_dth(x) for x in (q_BHLK, k_BHLK, v_BHLC)),
        keys_BL=every_dth(keys_BL[:, None, :, None])[:, 0, :, 0],
        window=replace(window, dilation=1),
        shared=shared,
    )
    return out.unflatten(0, (-1, dilation)).movedim(1, 3).flatten(2, 3)[:, :, :length]


def softmax_weights(q_BHMK: Tensor, k_BHLK: Tensor, visible: Tensor) -> Tensor:
    """softmax(q kᵀ / √K) over the visible keys, BHML: the map, in float32 or float64.

    `visible` broadcasts to BHML; a query that sees no key has the weights 0.
    """
    with full_precision(q_BHMK):
        logits_BHML = wide(q_BHMK) @ wide(k_BHLK).mT / math.sqrt(q_BHMK.shape[-1])
    return visible_softmax(logits_BHML, visible)


def visible_softmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible entries of the last axis; 0 for the others, and if there are none.

    `visible` broadcasts to the logits.
    """
    # A finite floor, so that a row that sees nothing is 0 below and not NaN.
    floor = torch.finfo(logits.dtype).min
    return logits.masked_fill(~visible, floor).softmax(dim=-1).masked_fill(~visible, 0)


@final
@dataclass(frozen=True)
class WindowCache:
    """Keys and values of the last M positions, in a ring; `length` positions were seen in all."""

    k_BHMK: Tensor
    v_BHMC: Tensor
    length: int

    @classmethod
    def empty(cls, k_BHK: Tensor, v_BHC: Tensor, window: int) -> "WindowCache":
        """Room for `window` positions and the own one; keys and values give sizes and dtype."""
        k_BHMK, v_BHMC = (x.new_zeros(*x.shape[:2], window + 1, x.shape[2]) for x in (k_BHK, v_BHC))
        return cls(k_BHMK, v_BHMC, length=0)

    def __getitem__(self, rows_B: Tensor) -> "WindowCache":
        """See `State`."""
        return replace(self, k_BHMK=self.k_BHMK[rows_B], v_BHMC=self.v_BHMC[rows_B])

    def append(self, k_BHK: Tensor, v_BHC: Tensor) -> "WindowCache":
        """Writes one position, in place, where the oldest one was."""
        place = self.length % self.k_BHMK.shape[2]
        self.k_BHMK[:, :, place] = k_BHK
        self.v_BHMC[:, :, place] = v_BHC
        return replace(self, length=self.length + 1)

    def attend(self, q_BHK: Tensor) -> Tensor:
        """softmax(q kᵀ / √K) v over the positions that are kept, BHC."""
        # Before the ring is full its end is empty; the order of keys does not matter.
        k, v = (x[:, :, : self.length] for x in (self.k_BHMK, self.v_BHMC))
        scale = 1 / math.sqrt(q_BHK.shape[-1])
        out_BH1C = F.scaled_dot_product_attention(q_BHK[:, :, None], k, v, scale=scale)
        return out_BH1C.squeeze(2).to(self.v_BHMC.dtype)
