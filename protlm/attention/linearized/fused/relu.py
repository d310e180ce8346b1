"""Bidirectional attention with ReLU features by Triton kernels; symbols as in `relu_kernels`."""

from typing import Any

import torch
from torch import Tensor

from protlm.attention.linearized.fused import relu_kernels as kernels
from protlm.attention.linearized.fused.launch import (
    FORWARD,
    GRADIENTS,
    KEY_GRADIENTS,
    Grid,
    bytes_of,
    on_device,
    vectors,
)


@torch.library.custom_op("protlm::relu_attention", mutates_args=())
def relu_attention(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor, w_RK: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes attention with ReLU features.

    Args:
        q_BHLK: queries, in bfloat16 or float32, like keys and values.
        k_BHLK: keys.
        v_BHLC: values.
        mask_BL: false at padding.
        w_RK: rows w, float32, contiguous.
        epsilon: ε.

    Returns:
        The output, BHLC, and for the gradients S, BHRC, both in the dtype of the values; and
        z, BHR, and D, BHL, in float32.
    """
    grid = Grid.of(q_BHLK, v_BHLC, w_RK, FORWARD)
    batch, heads, length, _ = q_BHLK.shape
    mask, out_BHLC = bytes_of(mask_BL), torch.empty_like(v_BHLC)
    parts = grid.parts_like(w_RK, batch, heads)
    totals_BHL = w_RK.new_empty(batch, heads, length)
    with on_device(q_BHLK):
        kernels.sum_keys[grid.by_features](
            *(vectors(k_BHLK), vectors(v_BHLC), mask, w_RK, epsilon, *parts),
            *(heads, length, grid.part_length, grid.sizes),
            **grid.options,
        )
        s_BHRC, z_BHR = (x.sum(dim=0) for x in parts)
        s_BHRC = s_BHRC.to(v_BHLC.dtype)
        kernels.divide_sums[grid.by_positions](
            *(vectors(q_BHLK), mask, w_RK, epsilon, s_BHRC, z_BHR, vectors(out_BHLC)),
            *(totals_BHL, heads, length, grid.sizes),
            **grid.options,
        )
    return out_BHLC, s_BHRC, z_BHR, totals_BHL


@torch.library.custom_op("protlm::relu_attention_gradients", mutates_args=())
def _gradients(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    mask_BL: Tensor,
    w_RK: Tensor,
    epsilon: float,
    out_BHLC: Tensor,
    s_BHRC: Tensor,
    z_BHR: Tensor,
    totals_BHL: Tensor,
    dout_BHLC: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grid = Grid.of(q_BHLK, v_BHLC, w_RK, GRADIENTS)
    key_grid = Grid.of(q_BHLK, v_BHLC, w_RK, KEY_GRADIENTS)
    batch, heads, length, _ = q_BHLK.shape
    dq_BHLK, dk_BHLK, dv_BHLC = (torch.empty_like(x) for x in (q_BHLK, k_BHLK, v_BHLC))
    mask, dtotals_BHL = bytes_of(mask_BL), torch.empty_like(totals_BHL)
    ds, dz = grid.parts_like(w_RK, batch, heads)
    with on_device(q_BHLK):
        kernels.query_gradients[grid.by_positions](
            *(vectors(q_BHLK), mask, w_RK, s_BHRC, z_BHR, vectors(out_BHLC), totals_BHL),
            *(vectors(dout_BHLC), vectors(dq_BHLK), dtotals_BHL, heads, length, grid.sizes),
            **grid.options,
        )
        kernels.sum_gradients[grid.by_features](
            *(vectors(q_BHLK), mask, w_RK, epsilon, totals_BHL, vectors(dout_BHLC), dtotals_BHL),
            *(ds, dz, heads, length, grid.part_length, grid.sizes),
            **grid.options,
        )
        kernels.key_gradients[key_grid.by_positions](
            *(vectors(k_BHLK), vectors(v_BHLC), mask, w_RK, epsilon),
            *(ds.sum(dim=0).to(v_BHLC.dtype), dz.sum(dim=0), vectors(dk_BHLK), vectors(dv_BHLC)),
            *(heads, length, key_grid.sizes),
            **key_grid.options,
        )
    return dq_BHLK, dk_BHLK, dv_BHLC


@relu_attention.register_fake
def _(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor, w_RK: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length, width = v_BHLC.shape
    z_BHR = w_RK.new_empty(batch, heads, len(w_RK))
    s_BHRC = v_BHLC.new_empty(*z_BHR.shape, width)
    totals_BHL = w_RK.new_empty(batch, heads, length)
    return torch.empty_like(v_BHLC), s_BHRC, z_BHR, totals_BHL


@_gradients.register_fake
def _(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, *others: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_BHLK), torch.empty_like(k_BHLK), torch.empty_like(v_BHLC)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.epsilon = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, dout_BHLC: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    # q, k, v, the mask and the rows are the first five.
    inputs, outputs = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    return *_gradients(*inputs, ctx.epsilon, *outputs, dout_BHLC), None, None, None


relu_attention.register_autograd(_backward, setup_context=_save)
