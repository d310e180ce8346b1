"""Bidirectional FAVOR+ by Triton kernels, as operators; symbols as in `softmax_kernels`."""

from typing import Any

import torch
from torch import Tensor

from protlm.attention.linearized.fused import softmax_kernels as kernels
from protlm.attention.linearized.fused.launch import (
    FORWARD,
    GRADIENTS,
    KEY_GRADIENTS,
    Grid,
    bytes_of,
    on_device,
    vectors,
)


@torch.library.custom_op("protlm::softmax_attention", mutates_args=())
def softmax_attention(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor, w_RK: Tensor, bias_R: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes attention with FAVOR+ features.

    Args:
        q_BHLK: queries, in bfloat16 or float32, like keys and values.
        k_BHLK: keys.
        v_BHLC: values.
        mask_BL: false at padding.
        w_RK: rows w, float32, contiguous.
        bias_R: c, float32.

    Returns:
        The output, BHLC, and for the gradients U, BHRC, both in the dtype of the values; and
        m, BHR, and n, BHL, in float32.
    """
    grid = Grid.of(q_BHLK, v_BHLC, w_RK, FORWARD)
    batch, heads, length, _ = q_BHLK.shape
    mask, out_BHLC = bytes_of(mask_BL), torch.empty_like(v_BHLC)
    parts = grid.parts_like(w_RK, batch, heads)
    log_totals_BHL = w_RK.new_empty(batch, heads, length)
    with on_device(q_BHLK):
        kernels.attend_to_keys[grid.by_features](
            *(vectors(k_BHLK), vectors(v_BHLC), mask, w_RK, *parts),
            *(heads, length, grid.part_length, grid.sizes),
            **grid.options,
        )
        u_BHRC, log_sums_BHR = _joined(*parts)
        u_BHRC = u_BHRC.to(v_BHLC.dtype)
        kernels.attend_to_features[grid.by_positions](
            *(vectors(q_BHLK), mask, w_RK, bias_R, u_BHRC, log_sums_BHR, vectors(out_BHLC)),
            *(log_totals_BHL, heads, length, grid.sizes),
            **grid.options,
        )
    return out_BHLC, u_BHRC, log_sums_BHR, log_totals_BHL


def _joined(u: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the softmaxes over parts of the keys, which are the first axis."""
    if len(u) == 1:
        return u[0], log_sums[0]
    highest = log_sums.amax(dim=0)
    weights = (log_sums - highest).exp2()
    total = weights.sum(dim=0)
    return ((weights / total)[..., None] * u).sum(dim=0), highest + total.log2()


@torch.library.custom_op("protlm::softmax_attention_gradients", mutates_args=())
def _gradients(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    mask_BL: Tensor,
    w_RK: Tensor,
    bias_R: Tensor,
    out_BHLC: Tensor,
    u_BHRC: Tensor,
    log_sums_BHR: Tensor,
    log_totals_BHL: Tensor,
    dout_BHLC: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grid = Grid.of(q_BHLK, v_BHLC, w_RK, GRADIENTS)
    key_grid = Grid.of(q_BHLK, v_BHLC, w_RK, KEY_GRADIENTS)
    batch, heads, length, _ = q_BHLK.shape
    dq_BHLK, dk_BHLK, dv_BHLC = (torch.empty_like(x) for x in (q_BHLK, k_BHLK, v_BHLC))
    mask, along_BHL = bytes_of(mask_BL), torch.empty_like(log_totals_BHL)
    du, d = grid.parts_like(w_RK, batch, heads)
    with on_device(q_BHLK):
        kernels.query_gradients[grid.by_positions](
            *(vectors(q_BHLK), mask, w_RK, bias_R, u_BHRC, log_sums_BHR, vectors(out_BHLC)),
            *(log_totals_BHL, vectors(dout_BHLC), vectors(dq_BHLK), along_BHL),
            *(heads, length, grid.sizes),
            **grid.options,
        )
        kernels.feature_gradients[grid.by_features](
            *(vectors(q_BHLK), mask, w_RK, bias_R, log_sums_BHR, log_totals_BHL),
            *(vectors(dout_BHLC), along_BHL, du, d),
            *(heads, length, grid.part_length, grid.sizes),
            **grid.options,
        )
        kernels.key_gradients[key_grid.by_positions](
            *(vectors(k_BHLK), vectors(v_BHLC), mask, w_RK, log_sums_BHR),
            *(du.sum(dim=0).to(v_BHLC.dtype), d.sum(dim=0), vectors(dk_BHLK), vectors(dv_BHLC)),
            *(heads, length, key_grid.sizes),
            **key_grid.options,
        )
    return dq_BHLK, dk_BHLK, dv_BHLC


@softmax_attention.register_fake
def _(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor, w_RK: Tensor, bias_R: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length, width = v_BHLC.shape
    log_sums_BHR = w_RK.new_empty(batch, heads, len(w_RK))
    u_BHRC = v_BHLC.new_empty(*log_sums_BHR.shape, width)
    log_totals_BHL = w_RK.new_empty(batch, heads, length)
    return torch.empty_like(v_BHLC), u_BHRC, log_sums_BHR, log_totals_BHL


@_gradients.register_fake
def _(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_BHLK), torch.empty_like(k_BHLK), torch.empty_like(v_BHLC)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, dout_BHLC: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(*ctx.saved_tensors, dout_BHLC), None, None, None


softmax_attention.register_autograd(_backward, setup_context=_save)
