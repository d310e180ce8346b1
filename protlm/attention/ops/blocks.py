"""Softmax within blocks of positions and in sliding windows."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_exporting


def to_blocks(x_BHLK: Tensor, size: int, *, value: float = 0.0) -> Tensor:
    """Splits positions into S = ⌈L / size⌉ blocks of M = size, BHSMK; `value` pads the last one.

    An exported graph has another block, of padding: it could not have one block or several.
    """
    length = x_BHLK.shape[2]
    number = (length + (2 * size if is_exporting() else size) - 1) // size
    if is_exporting() or number * size > length:
        x_BHLK = F.pad(x_BHLK, (0, 0, 0, number * size - length), value=value)
    return x_BHLK.unflatten(2, (number, size))


def from_blocks(x_BHSMK: Tensor, length: int) -> Tensor:
    """Joins blocks, BHLK, without the padding of the last one."""
    x_BHLK = x_BHSMK.flatten(2, 3)
    if is_exporting():
        return x_BHLK.index_select(2, torch.arange(length, device=x_BHLK.device))
    return x_BHLK[:, :, :length]


def with_margins(
    x_BHSMK: Tensor, *, before: int, after: int, shared_BHPK: Tensor | None = None
) -> Tensor:
    """Concatenates every block with the positions before and after it; zeros beyond the ends.

    Returns (B, H, S, P + before + M + after, K), where `shared_BHPK` is prepended to every block.
    """
    number, size = x_BHSMK.shape[2:4]
    blocks_before, blocks_after = math.ceil(before / size), math.ceil(after / size)
    # Heads come after blocks in memory, so that the fused kernels need no copy.
    padded = F.pad(x_BHSMK.transpose(1, 2), (0, 0, 0, 0, 0, 0, blocks_before, blocks_after))
    parts = [padded[:, shift : shift + number] for shift in range(blocks_before + 1 + blocks_after)]
    parts[0] = parts[0][..., blocks_before * size - before :, :]
    parts[-1] = parts[-1][..., : parts[-1].shape[3] - (blocks_after * size - after), :]
    if shared_BHPK is not None:
        parts.insert(0, shared_BHPK[:, None].expand(-1, number, -1, -1, -1))
    return torch.cat(parts, dim=3).transpose(1, 2)


def softmax_in_blocks(q_BHSMK: Tensor, k_BHSLK: Tensor, v_BHSLC: Tensor, visible: Tensor) -> Tensor:
    """Computes softmax(q kᵀ / √K) v in every block separately, by the fused kernels of torch.

    `visible` is true where a query sees a key, and broadcasts to (B, H, S, M, L). The output of a
    query without visible keys is 0. BHSMC, in the dtype of the values.
    """
    batch, _, number, num_queries, key_width = q_BHSMK.shape
    num_keys, value_width = k_BHSLK.shape[3], v_BHSLC.shape[4]
    sees_any = visible.any(dim=-1, keepdim=True)
    # A row without visible keys would be NaN: it sees all of them, and is cleared at the end.
    visible = (visible | ~sees_any).expand(batch, visible.shape[1], number, num_queries, num_keys)
    # The fused kernels need four axes, one width, and a mask of one or all heads.
    width = -(-max(key_width, value_width) // 8) * 8
    # Padding by 0 is skipped, because it would copy.
    q, k, v = (
        (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])))
        .transpose(1, 2)
        .flatten(0, 1)
        for x in (q_BHSMK, k_BHSLK, v_BHSLC)
    )
    if is_exporting():
        # Strides of one head that depend on the length would bound the length.
        q = q.clone(memory_format=torch.contiguous_format)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible.transpose(1, 2).flatten(0, 1), scale=1 / math.sqrt(key_width)
    )
    out_BHSMC = out[..., :value_width].unflatten(0, (batch, number)).transpose(1, 2)
    return out_BHSMC.masked_fill(~sees_any, 0).to(v_BHSLC.dtype)


# The matrix products of smaller blocks would be slow.
_SMALLEST_BLOCK = 64


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
        before, after = (window, 0) if causal else (window // 2, window // 2)
        return cls(before, after, dilation)

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

    Keys and values are finite everywhere; windows see those of `keys_BL`, and all see `shared`. If
    `keys_BL` are numbers of segments, from 1, windows end with their segments.
    BHLC, in the dtype of the values; 0 for a query without visible keys.
    """
    if window.dilation > 1:
        return _dilated_softmax(q_BHLK, k_BHLK, v_BHLC, keys_BL, window, shared)
    length = q_BHLK.shape[2]
    before, after = window.before, window.after
    # Half of a window: smaller blocks would copy keys more often, larger ones would compute more
    # masked weights.
    size = max((before + after) // 2, _SMALLEST_BLOCK)
    # A single block contains all keys, if that costs no more. An exported graph has any length.
    if not is_exporting() and length <= size + before + after:
        before, after, size = 0, 0, length
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
    if is_key.dtype != torch.bool:
        is_key = is_key == to_blocks(keys_BL[:, None, :, None], size).mT
    visible = window.sees(key - query_M1) & is_key.mT
    if shared is not None:
        visible = torch.cat([to_blocks(shared.visible_BLP[:, None], size), visible], dim=-1)
    return from_blocks(softmax_in_blocks(to_blocks(q_BHLK, size), k, v, visible), length)


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
