"""Exact bidirectional softmax attention on a CPU, a tile of queries at a time.

torch's fused kernel for a CPU multiplies blocks that are too small for the rate of its products.
Here the weights of a tile's queries for all keys are one product. They are computed again in the
backward pass, so that memory grows with the length alone. Tensors without a suffix are of one head
of one sample.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.performer.products import product
from protlm.attention.precision import full_precision, wide, wide_dtype

# Weights of a tile: two MiB of float32 for each thread, which the last cache holds.
_NUMBERS = 1 << 19
# Where torch's kernel is no slower: short rows are all overhead here, and every product is cut
# among the threads, while torch gives each thread heads of its own.
_LEAST_LENGTH, _MOST_THREADS = 256, 4


def is_faster(length: int) -> bool:
    """Whether this is faster than torch's fused kernel, for rows of so many positions."""
    return length >= _LEAST_LENGTH and torch.get_num_threads() <= _MOST_THREADS


class ExactAttention(torch.autograd.Function):
    """`apply(q, k, v, bias)` returns softmax(q kᵀ / √K + bias) v, BHLC.

    `bias` is that of the keys, BL, in float32 (float64 for float64 queries), or None.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, bias_BL: Tensor | None
    ) -> Tensor:
        """Reads the values of one tile of queries after the other."""
        out_BHLC = torch.empty_like(v_BHLC)
        log_sums_BHL1 = torch.empty_like(q_BHLK[..., :1], dtype=wide_dtype(q_BHLK))
        with full_precision(v_BHLC):
            for sample, head in _heads(q_BHLK):
                logits_of = _Logits(q_BHLK, k_BHLK, bias_BL, sample, head)
                v = v_BHLC[sample, head]
                for rows in _tiles(len(v)):
                    logits = logits_of(rows)
                    largest = logits.amax(dim=-1, keepdim=True)
                    weights = logits.sub_(largest).exp2_()
                    sums = weights.sum(dim=-1, keepdim=True)
                    out_BHLC[sample, head, rows] = product(weights.to(v.dtype), v.mT) / sums
                    log_sums_BHL1[sample, head, rows] = largest + sums.log2()
        ctx.save_for_backward(q_BHLK, k_BHLK, v_BHLC, bias_BL, log_sums_BHL1)
        return out_BHLC

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Adds up the gradients of keys and values over the tiles of queries."""
        (dout_BHLC,) = grad_outputs
        q_BHLK, k_BHLK, v_BHLC, bias_BL, log_sums_BHL1 = ctx.saved_tensors
        dq_BHLK, dk_BHLK, dv_BHLC = (torch.empty_like(x) for x in (q_BHLK, k_BHLK, v_BHLC))
        scale = 1 / math.sqrt(q_BHLK.shape[-1])
        with full_precision(v_BHLC):
            for sample, head in _heads(q_BHLK):
                logits_of = _Logits(q_BHLK, k_BHLK, bias_BL, sample, head)
                q, k, v = (x[sample, head] for x in (q_BHLK, k_BHLK, v_BHLC))
                wide_v = wide(v).contiguous()
                # Transposed, so that a tile's weights are read in the order they are written in.
                dk_t, dv_t = (wide(x).new_zeros(x.shape).mT.contiguous() for x in (k, v))
                for rows in _tiles(len(q)):
                    weights = logits_of(rows).sub_(log_sums_BHL1[sample, head, rows]).exp2_()
                    dout = dout_BHLC[sample, head, rows]
                    dv_t += product(dout.mT, weights.to(v.dtype).mT)
                    dweights = product(wide(dout).contiguous(), wide_v)
                    dlogits = torch.ops.aten._softmax_backward_data(
                        dweights, weights, -1, weights.dtype
                    ).to(q.dtype)
                    dq_BHLK[sample, head, rows] = product(dlogits, k.mT).mul_(scale)
                    dk_t += product(q[rows].mT, dlogits.mT)
                dk_BHLK[sample, head] = dk_t.mul_(scale).mT.contiguous()
                dv_BHLC[sample, head] = dv_t.mT.contiguous()
        return dq_BHLK, dk_BHLK, dv_BHLC, None


class _Logits:
    """log₂ of a head's unnormalised weights, in float32 at least: exp2 is faster than exp."""

    def __init__(
        self, q_BHLK: Tensor, k_BHLK: Tensor, bias_BL: Tensor | None, sample: int, head: int
    ) -> None:
        self._q = wide(q_BHLK[sample, head]) * (math.log2(math.e) / math.sqrt(q_BHLK.shape[-1]))
        self._k = wide(k_BHLK[sample, head]).contiguous()
        self._bias = None if bias_BL is None else bias_BL[sample] * math.log2(math.e)

    def __call__(self, rows: slice) -> Tensor:
        return product(self._q[rows].contiguous(), self._k, self._bias)


def _heads(x_BHLK: Tensor) -> Iterator[tuple[int, int]]:
    batch, heads = x_BHLK.shape[:2]
    return ((sample, head) for sample in range(batch) for head in range(heads))


def _tiles(length: int) -> Iterator[slice]:
    size = max(_NUMBERS * torch.get_num_threads() // length, 64)
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
