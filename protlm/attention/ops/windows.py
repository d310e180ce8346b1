"""Softmax over a sliding window of positions, and its cache for decoding."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.ops.blocks import from_blocks, softmax_in_blocks, to_blocks, with_margins
from protlm.attention.ops.masking import visible_softmax
from protlm.attention.ops.numerics import no_autocast, upcast
from protlm.attention.ops.options import require_at_least
from protlm.system.errors import UserError

# The matrix products of smaller blocks would be slow.
_SMALLEST_BLOCK = 64


def check_window(window: int) -> None:
    """Rejects a window without a middle."""
    if window < 2 or window % 2:
        raise UserError(
            f"attention.window={window} must be even and at least 2: half of the positions are on "
            "either side; type attention.window=512"
        )


def check_dilation(dilation: int, dilated_heads: int, num_heads: int) -> None:
    """Rejects dilated windows that no head has."""
    require_at_least("dilation", dilation, 1, example=2, otherwise="1 for no gaps")
    if not 0 <= dilated_heads <= num_heads:
        raise UserError(
            f"attention.dilated_heads={dilated_heads} must be between 0 and the {num_heads} heads "
            "(model.num_heads); the paper dilates 2"
        )
    if dilation > 1 and dilated_heads == 0:
        raise UserError(
            f"attention.dilation={dilation} with attention.dilated_heads=0 dilates nothing; set "
            "attention.dilated_heads=2, or attention.dilation=1 for no gaps"
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
        """Creates a window of `window` other positions: half on either side, or all before."""
        if causal:
            return cls(window, 0, dilation)
        return cls(window // 2, window // 2, dilation)

    def sees(self, offset: Tensor) -> Tensor:
        """Returns whether a query sees the key `offset` positions after it."""
        steps = offset.div(self.dilation, rounding_mode="floor")
        is_step = offset == steps * self.dilation
        return is_step & (steps >= -self.before) & (steps <= self.after)


class SharedKeys(NamedTuple):
    """P keys that queries see beside their windows, in the same softmax.

    `visible_BLP` is true where a query sees a key.
    """

    k_BHPK: Tensor
    v_BHPC: Tensor
    visible_BLP: Tensor

    def of_heads(self, heads: slice) -> "SharedKeys":
        """Selects some heads."""
        return self._replace(k_BHPK=self.k_BHPK[:, heads], v_BHPC=self.v_BHPC[:, heads])


def window_softmax(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    *,
    keys_BL: Tensor,
    window: Window,
    shared: SharedKeys | None = None,
) -> Tensor:
    """Computes softmax(q kᵀ / √K) v over the window of every query, in linear time and memory.

    Args:
        q_BHLK: queries.
        k_BHLK: keys, finite everywhere.
        v_BHLC: values, finite everywhere.
        keys_BL: true for keys that windows may see.
        window: the positions that a query sees.
        shared: further keys, outside the windows.

    Returns:
        BHLC, in the dtype of the values; 0 for a query without visible keys.
    """
    if window.dilation > 1:
        return _dilated_softmax(q_BHLK, k_BHLK, v_BHLC, keys_BL, window, shared)
    length = q_BHLK.shape[2]
    before, after, size = window.before, window.after, _block_size(length, window)
    if size == length:
        # A single block contains all keys.
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
        is_visible = to_blocks(shared.visible_BLP[:, None], size)
        visible = torch.cat([is_visible, visible], dim=-1)
    return from_blocks(softmax_in_blocks(to_blocks(q_BHLK, size), k, v, visible), length)


def _block_size(length: int, window: Window) -> int:
    """Returns the size of a block: half of a window, or all positions if that costs no more.

    Smaller blocks would copy keys more often, larger ones would compute more masked weights.
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
    """Splits positions into d sequences of every d-th position, with windows without gaps."""
    length, dilation = q_BHLK.shape[2], window.dilation
    missing = -length % dilation

    def every_dth(x_BHLK: Tensor) -> Tensor:
        padded = F.pad(x_BHLK, (0, 0, 0, missing)).unflatten(2, (-1, dilation))
        return padded.movedim(3, 1).flatten(0, 1)

    if shared is not None:
        k, v = (x.repeat_interleave(dilation, dim=0) for x in (shared.k_BHPK, shared.v_BHPC))
        shared = SharedKeys(k, v, every_dth(shared.visible_BLP[:, None])[:, 0])
    out = window_softmax(
        *(every_dth(x) for x in (q_BHLK, k_BHLK, v_BHLC)),
        keys_BL=every_dth(keys_BL[:, None, :, None])[:, 0, :, 0],
        window=replace(window, dilation=1),
        shared=shared,
    )
    return out.unflatten(0, (-1, dilation)).movedim(1, 3).flatten(2, 3)[:, :, :length]


def softmax_weights(q_BHMK: Tensor, k_BHLK: Tensor, visible: Tensor) -> Tensor:
    """Computes softmax(q kᵀ / √K) over the visible keys, BHML, in float32 or float64.

    `visible` broadcasts to BHML; the weights of a query without visible keys are 0.
    """
    with no_autocast(q_BHMK):
        logits_BHML = upcast(q_BHMK) @ upcast(k_BHLK).mT / math.sqrt(q_BHMK.shape[-1])
    return visible_softmax(logits_BHML, visible)


@final
@dataclass(frozen=True)
class WindowCache:
    """A ring buffer of keys and values of the last M positions, of `length` positions in total."""

    k_BHMK: Tensor
    v_BHMC: Tensor
    length: int

    @classmethod
    def empty(cls, k_BHK: Tensor, v_BHC: Tensor, window: int) -> "WindowCache":
        """Allocates `window` + 1 positions; keys and values give sizes and dtype."""
        k_BHMK, v_BHMC = (x.new_zeros(*x.shape[:2], window + 1, x.shape[2]) for x in (k_BHK, v_BHC))
        return cls(k_BHMK, v_BHMC, length=0)

    def __getitem__(self, rows_B: Tensor) -> "WindowCache":
        return replace(self, k_BHMK=self.k_BHMK[rows_B], v_BHMC=self.v_BHMC[rows_B])

    def append(self, k_BHK: Tensor, v_BHC: Tensor) -> "WindowCache":
        """Overwrites the oldest position in place."""
        place = self.length % self.k_BHMK.shape[2]
        self.k_BHMK[:, :, place] = k_BHK
        self.v_BHMC[:, :, place] = v_BHC
        return replace(self, length=self.length + 1)

    def attend(self, q_BHK: Tensor) -> Tensor:
        """Computes softmax(q kᵀ / √K) v over the cached positions, BHC."""
        # Until the ring is full, its end is empty. The order of keys does not matter.
        k, v = (x[:, :, : self.length] for x in (self.k_BHMK, self.v_BHMC))
        scale = 1 / math.sqrt(q_BHK.shape[-1])
        out_BH1C = F.scaled_dot_product_attention(q_BHK[:, :, None], k, v, scale=scale)
        return out_BH1C.squeeze(2).to(self.v_BHMC.dtype)
