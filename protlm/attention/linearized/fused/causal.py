"""Causal linear attention by Triton kernels, as operators; symbols as in `causal_kernels`."""

from typing import Any

import torch
from torch import Tensor

from protlm.attention.linearized.fused import causal_gradients as gradients
from protlm.attention.linearized.fused import causal_kernels as kernels
from protlm.attention.linearized.fused import direct_kernels
from protlm.attention.linearized.fused.launch import (
    CAUSAL,
    Grid,
    bytes_of,
    causal_gradients,
    on_device,
    vectors,
)

# They hold the most in registers, and are rarely needed.
_DIRECT_OPTIONS = {"num_warps": 8, "num_stages": 1}


@torch.library.custom_op("protlm::causal_attention", mutates_args=())
def causal_attention(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    mask_BL: Tensor,
    w_RK: Tensor,
    bias_R: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes causal attention.

    Args:
        q_BHLK: queries, in bfloat16 or float32, like keys and values.
        k_BHLK: keys.
        v_BHLC: values.
        mask_BL: false at padding.
        w_RK: rows w, float32, contiguous.
        bias_R: c of positive features, float32; None for ReLU.
        epsilon: ε of ReLU.

    Returns:
        The output, BHLC, in the dtype of the values; and for the gradients D or log₂ D, BHL in
        float32, and the first direct row of each chunk, (B, H, chunks), which only positive
        features have.
    """
    grid = Grid.of(q_BHLK, v_BHLC, w_RK, CAUSAL)
    batch, heads, length, _ = q_BHLK.shape
    mask, out_BHLC = bytes_of(mask_BL), torch.empty_like(v_BHLC)
    totals_BHL = w_RK.new_empty(batch, heads, length)
    directs = w_RK.new_empty(batch, heads, grid.by_positions[1], dtype=torch.int32)
    with on_device(q_BHLK):
        states = _sum_keys(grid, k_BHLK, v_BHLC, mask, w_RK, bias_R, epsilon)
        kernels.attend[grid.by_positions](
            *(vectors(q_BHLK), vectors(k_BHLK), vectors(v_BHLC), mask, w_RK, bias_R, epsilon),
            *(*states, vectors(out_BHLC), totals_BHL, directs, heads, length, grid.sizes),
            **grid.options,
        )
        if bias_R is not None:
            direct_kernels.attend_directly[grid.by_positions](
                *(vectors(q_BHLK), vectors(k_BHLK), vectors(v_BHLC), mask, w_RK, bias_R, *states),
                *(vectors(out_BHLC), totals_BHL, directs, heads, length, grid.sizes),
                **_DIRECT_OPTIONS,
            )
    return out_BHLC, totals_BHL, directs


def _sum_keys(
    grid: Grid,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    mask: Tensor,
    w_RK: Tensor,
    bias_R: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the states before each chunk, S, z and M."""
    _, heads, length, _ = k_BHLK.shape
    s, z = grid.states_like(v_BHLC)
    references = None if bias_R is None else grid.references_like(v_BHLC)
    kernels.sum_keys[grid.by_features[:1]](
        *(vectors(k_BHLK), vectors(v_BHLC), mask, w_RK, bias_R, epsilon, s, z, references),
        *(heads, length, grid.sizes),
        **grid.options,
    )
    return s, z, references


@torch.library.custom_op("protlm::causal_attention_gradients", mutates_args=())
def _gradients(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    mask_BL: Tensor,
    w_RK: Tensor,
    bias_R: Tensor | None,
    epsilon: float,
    out_BHLC: Tensor,
    totals_BHL: Tensor,
    directs: Tensor,
    dout_BHLC: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grid = Grid.of(q_BHLK, v_BHLC, w_RK, CAUSAL)
    back = Grid.of(q_BHLK, v_BHLC, w_RK, causal_gradients(q_BHLK.device))
    _, heads, length, _ = q_BHLK.shape
    dq_BHLK, dk_BHLK, dv_BHLC = (torch.empty_like(x) for x in (q_BHLK, k_BHLK, v_BHLC))
    mask, along_BHL = bytes_of(mask_BL), torch.empty_like(totals_BHL)
    q, k, v, dout = (vectors(x) for x in (q_BHLK, k_BHLK, v_BHLC, dout_BHLC))
    with on_device(q_BHLK):
        # They would take several times the memory of the inputs until the backward pass.
        s, z, references = _sum_keys(grid, k_BHLK, v_BHLC, mask, w_RK, bias_R, epsilon)
        gradients.query_gradients[back.by_positions](
            *(q, k, v, mask, w_RK, bias_R, epsilon, s, z, references, vectors(out_BHLC)),
            *(totals_BHL, directs, dout, vectors(dq_BHLK), along_BHL, heads, length, back.sizes),
            **back.options,
        )
        ds, dz = s, z
        gradients.sum_queries[grid.by_features[:1]](
            *(q, mask, w_RK, bias_R, epsilon, references, totals_BHL, dout, along_BHL, ds, dz),
            *(heads, length, grid.sizes),
            **grid.options,
        )
        gradients.value_gradients[grid.by_positions](
            *(q, k, mask, w_RK, bias_R, epsilon, references, totals_BHL, directs, dout, ds),
            *(vectors(dv_BHLC), heads, length, grid.sizes),
            **grid.options,
        )
        gradients.key_gradients[back.by_positions](
            *(q, k, v, mask, w_RK, bias_R, epsilon, references, totals_BHL, directs, dout),
            *(along_BHL, ds, dz, vectors(dk_BHLK), heads, length, back.sizes),
            **back.options,
        )
        if bias_R is not None:
            direct_kernels.add_direct_gradients[grid.by_positions](
                *(q, k, v, mask, w_RK, bias_R, totals_BHL, directs, dout, along_BHL),
                *(vectors(dq_BHLK), vectors(dk_BHLK), vectors(dv_BHLC), heads, length),
                *(grid.sizes,),
                **_DIRECT_OPTIONS,
            )
    return dq_BHLK, dk_BHLK, dv_BHLC


@causal_attention.register_fake
def _(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    mask_BL: Tensor,
    w_RK: Tensor,
    bias_R: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grid = Grid.of(q_BHLK, v_BHLC, w_RK, CAUSAL)
    batch, heads, length, _ = v_BHLC.shape
    directs = w_RK.new_empty(batch, heads, grid.by_positions[1], dtype=torch.int32)
    return torch.empty_like(v_BHLC), w_RK.new_empty(batch, heads, length), directs


@_gradients.register_fake
def _(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, *others: Tensor | float | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_BHLK), torch.empty_like(k_BHLK), torch.empty_like(v_BHLC)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.epsilon = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, dout_BHLC: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    # q, k, v, the mask, the rows and c are the first six.
    inputs, outputs = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
    return *_gradients(*inputs, ctx.epsilon, *outputs, dout_BHLC), None, None, None, None


causal_attention.register_autograd(_backward, setup_context=_save)
