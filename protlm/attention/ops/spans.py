"""Exact softmax of slices of queries over slices of keys, without a mask."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows of a causal mask that are in memory at a time.
_ROWS = 512


class _SpanSoftmax(torch.autograd.Function):
    """`apply(q, k, v, pairs)`; the gradient of each slice would have the size of the tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHLK: Tensor,
        k_BHMK: Tensor,
        v_BHMC: Tensor,
        pairs: Sequence[tuple[slice, slice]],
    ) -> Tensor:
        out_BHLC = v_BHMC.new_zeros(*q_BHLK.shape[:-1], v_BHMC.shape[-1])
        for rows, keys in pairs:
            out_BHLC[:, :, rows] = _attend(q_BHLK, k_BHMK, v_BHMC, rows, keys)
        ctx.pairs = pairs
        ctx.save_for_backward(q_BHLK, k_BHMK, v_BHMC)
        return out_BHLC

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        heads = ctx.saved_tensors
        gradients = [torch.zeros_like(x) for x in heads]
        for rows, keys in ctx.pairs:
            places = rows, keys, keys
            parts = [x[:, :, at].detach() for x, at in zip(heads, places, strict=True)]
            with torch.enable_grad():
                parts = [x.requires_grad_() for x in parts]
                out_BHMC = _attend(*parts, slice(None), slice(None))
            found = torch.autograd.grad(out_BHMC, parts, grad_outputs[0][:, :, rows])
            for gradient, at, part in zip(gradients, places, found, strict=True):
                gradient[:, :, at] += part
        return *gradients, None


def span_softmax(heads: Sequence[Tensor], pairs: Sequence[tuple[slice, slice]]) -> Tensor:
    """Computes softmax(q kᵀ / √K) v of each slice of queries over its slice of keys, BHLC.

    What is in no pair, or has no keys, is 0.
    """
    q, k, v = heads
    filled = [(rows, keys) for rows, keys in pairs if keys.start < keys.stop]
    out = _SpanSoftmax.apply(q.to(v.dtype), k.to(v.dtype), v, filled)
    assert isinstance(out, Tensor)
    return out


def continued_softmax(q_BHLK: Tensor, k_BHMK: Tensor, v_BHMC: Tensor) -> Tensor:
    """Computes causal softmax of the last L of M positions, BHLC."""
    length, total = q_BHLK.shape[2], k_BHMK.shape[2]
    parts: list[Tensor] = []
    for start in range(0, length, _ROWS):
        stop = min(start + _ROWS, length)
        end = total - length + stop
        sees = torch.ones(stop - start, end, dtype=torch.bool, device=q_BHLK.device)
        heads = q_BHLK[:, :, start:stop].to(v_BHMC.dtype), k_BHMK[:, :, :end], v_BHMC[:, :, :end]
        scale = 1 / math.sqrt(q_BHLK.shape[-1])
        sees = sees.tril(total - length + start)
        parts.append(F.scaled_dot_product_attention(*heads, attn_mask=sees, scale=scale))
    return torch.cat(parts, dim=2)


def _attend(q: Tensor, k: Tensor, v: Tensor, rows: slice, keys: slice) -> Tensor:
    scale = 1 / math.sqrt(q.shape[-1])
    return F.scaled_dot_product_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], scale=scale)
