"""Blocks of positions: splitting, joining, neighbors, and softmax within blocks."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def to_blocks(x_BHLK: Tensor, size: int, *, value: float = 0.0) -> Tensor:
    """Splits positions into S = ⌈L / size⌉ blocks of M = size, BHSMK; `value` pads the last one."""
    if missing := -x_BHLK.shape[2] % size:
        x_BHLK = F.pad(x_BHLK, (0, 0, 0, missing), value=value)
    return x_BHLK.unflatten(2, (-1, size))


def from_blocks(x_BHSMK: Tensor, length: int) -> Tensor:
    """Joins blocks, BHLK, without the padding of the last one."""
    return x_BHSMK.flatten(2, 3)[:, :, :length]


def with_neighbors(x_BHSMK: Tensor, *, before: int, after: int) -> Tensor:
    """Concatenates every block with the blocks before and after it; zeros beyond the ends.

    Returns:
        (B, H, S, (before + 1 + after) · M, K).
    """
    size = x_BHSMK.shape[3]
    return with_margins(x_BHSMK, before=before * size, after=after * size)


def with_margins(
    x_BHSMK: Tensor, *, before: int, after: int, shared_BHPK: Tensor | None = None
) -> Tensor:
    """Concatenates every block with the positions before and after it; zeros beyond the ends.

    Args:
        x_BHSMK: adjacent blocks.
        before: the number of positions before a block.
        after: the number of positions after it.
        shared_BHPK: positions to prepend to every block.

    Returns:
        (B, H, S, P + before + M + after, K).
    """
    number, size = x_BHSMK.shape[2:4]
    blocks_before, blocks_after = math.ceil(before / size), math.ceil(after / size)
    # Heads come after blocks in memory, so that the fused kernels need no copy.
    x_BSHMK = x_BHSMK.transpose(1, 2)
    padded = F.pad(x_BSHMK, (0, 0, 0, 0, 0, 0, blocks_before, blocks_after))
    parts = [padded[:, shift : shift + number] for shift in range(blocks_before + 1 + blocks_after)]
    parts[0] = parts[0][..., blocks_before * size - before :, :]
    parts[-1] = parts[-1][..., : parts[-1].shape[3] - (blocks_after * size - after), :]
    if shared_BHPK is not None:
        parts.insert(0, shared_BHPK[:, None].expand(-1, number, -1, -1, -1))
    return torch.cat(parts, dim=3).transpose(1, 2)


def softmax_in_blocks(q_BHSMK: Tensor, k_BHSLK: Tensor, v_BHSLC: Tensor, visible: Tensor) -> Tensor:
    """Computes softmax(q kᵀ / √K) v in every block separately, by the fused kernels of torch.

    Args:
        q_BHSMK: M queries of every block.
        k_BHSLK: the keys of every block, any number.
        v_BHSLC: their values.
        visible: true where a query sees a key; broadcasts to (B, H, S, M, L). The output of a
            query without visible keys is 0.

    Returns:
        BHSMC, in the dtype of the values.
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
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=visible.transpose(1, 2).flatten(0, 1),
        scale=1 / math.sqrt(key_width),
    )
    out_BHSMC = out[..., :value_width].unflatten(0, (batch, number)).transpose(1, 2)
    return out_BHSMC.masked_fill(~sees_any, 0).to(v_BHSLC.dtype)
