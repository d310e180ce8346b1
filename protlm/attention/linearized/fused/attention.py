"""Linear attention by Triton kernels, as an operator of torch; symbols as in the kernels."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protlm.attention.linearized.fused import bidirectional_kernels, causal_kernels
from protlm.attention.linearized.fused.blocks import (
    CAUSAL,
    FORWARD,
    GRADIENTS,
    KEY_GRADIENTS,
    Grid,
    bytes_of,
    causal_blocks,
    on_device,
    vectors,
)

_Three = tuple[Tensor, Tensor, Tensor]
_Four = tuple[Tensor, Tensor, Tensor, Tensor]


class _Rows(NamedTuple):
    """Rows w, RK; constants c of positive features, R, or None for ReLU; and ε of ReLU."""

    w_RK: Tensor
    bias_R: Tensor | None
    epsilon: float


@torch.library.custom_op("protlm::linear_attention", mutates_args=())
def attention(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    mask_BL: Tensor,
    w_RK: Tensor,
    bias_R: Tensor | None,
    epsilon: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes attention of q, k and v in bfloat16 or float32; `causal` by chunks.

    Returns the output, BHLC, in the dtype of the values. For the gradients: D or its logarithm,
    BHL; if bidirectional, S, BHRC, and z, BHR, and if causal, an empty tensor and M, BHR, which is
    empty for ReLU. All but S are in float32.
    """
    rows, compute = _Rows(w_RK, bias_R, epsilon), _causal if causal else _bidirectional
    with on_device(q_BHLK):
        return compute(q_BHLK, k_BHLK, v_BHLC, mask_BL, rows)


@torch.library.custom_op("protlm::linear_attention_gradients", mutates_args=())
def _gradients(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    mask_BL: Tensor,
    w_RK: Tensor,
    bias_R: Tensor | None,
    epsilon: float,
    causal: bool,
    saved: list[Tensor],
    dout_BHLC: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _Rows(w_RK, bias_R, epsilon)
    compute = _causal_gradients if causal else _bidirectional_gradients
    with on_device(q_BHLK):
        return compute((q_BHLK, k_BHLK, v_BHLC), mask_BL, rows, saved, dout_BHLC)


def _bidirectional(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor, rows: _Rows
) -> _Four:
    grid = Grid.of(q_BHLK, v_BHLC, rows.w_RK, FORWARD)
    out_BHLC, totals_BHL = torch.empty_like(v_BHLC), rows.w_RK.new_empty(q_BHLK.shape[:3])
    q, k, v, out = (vectors(x) for x in (q_BHLK, k_BHLK, v_BHLC, out_BHLC))
    mask, chunks = bytes_of(mask_BL), grid.chunks_like(v_BHLC)
    grid.over_chunks(bidirectional_kernels.sum_keys, k, v, mask, *rows, *chunks)
    s_BHRC, z_BHR = (x.sum(dim=0) for x in chunks) if rows.bias_R is None else _joined(*chunks)
    s_BHRC = s_BHRC.to(v_BHLC.dtype)
    arguments = q, mask, *rows, s_BHRC, z_BHR, out, totals_BHL
    grid.over_positions(bidirectional_kernels.attend, *arguments)
    return out_BHLC, totals_BHL, s_BHRC, z_BHR


def _joined(s: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the softmaxes over chunks of the keys, which are the first axis."""
    if len(s) == 1:
        return s[0], log_sums[0]
    highest = log_sums.amax(dim=0)
    weights = (log_sums - highest).exp2()
    total = weights.sum(dim=0)
    return ((weights / total)[..., None] * s).sum(dim=0), highest + total.log2()


def _bidirectional_gradients(
    inputs: _Three, mask_BL: Tensor, rows: _Rows, saved: list[Tensor], dout_BHLC: Tensor
) -> _Three:
    q_BHLK, _, v_BHLC = inputs
    out_BHLC, totals_BHL, s_BHRC, z_BHR = saved
    grid = Grid.of(q_BHLK, v_BHLC, rows.w_RK, GRADIENTS)
    key_grid = Grid.of(q_BHLK, v_BHLC, rows.w_RK, KEY_GRADIENTS)
    gradients = dq_BHLK, dk_BHLK, dv_BHLC = tuple(torch.empty_like(x) for x in inputs)
    q, k, v, out, dout = (vectors(x) for x in (*inputs, out_BHLC, dout_BHLC))
    dq, dk, dv = (vectors(x) for x in gradients)
    mask, along_BHL = bytes_of(mask_BL), torch.empty_like(totals_BHL)
    w_RK, bias_R, _ = rows
    grid.over_positions(
        bidirectional_kernels.query_gradients,
        *(q, mask, w_RK, bias_R, s_BHRC, z_BHR, out, totals_BHL, dout, dq, along_BHL),
    )
    chunks = grid.chunks_like(v_BHLC)
    grid.over_chunks(
        bidirectional_kernels.sum_queries,
        *(q, mask, *rows, z_BHR, totals_BHL, dout, along_BHL, *chunks),
    )
    ds_BHRC, dz_BHR = (x.sum(dim=0) for x in chunks)
    key_grid.over_positions(
        bidirectional_kernels.key_gradients,
        *(k, v, mask, *rows, z_BHR, ds_BHRC.to(v_BHLC.dtype), dz_BHR, dk, dv),
    )
    return dq_BHLK, dk_BHLK, dv_BHLC


def _causal(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor, rows: _Rows) -> _Four:
    grid = Grid.of(q_BHLK, v_BHLC, rows.w_RK, CAUSAL)
    out_BHLC, totals_BHL = torch.empty_like(v_BHLC), rows.w_RK.new_empty(q_BHLK.shape[:3])
    q, k, v, out = (vectors(x) for x in (q_BHLK, k_BHLK, v_BHLC, out_BHLC))
    mask, states = bytes_of(mask_BL), grid.states_like(v_BHLC)
    references = _first_exponents(k_BHLK, mask_BL, rows)
    grid.over_features(causal_kernels.sum_keys, k, v, mask, *rows, references, *states)
    arguments = q, k, v, mask, *rows, references, *states, out, totals_BHL
    grid.over_positions(causal_kernels.attend, *arguments)
    # The states would take several times the memory of the inputs until the backward pass.
    return out_BHLC, totals_BHL, v_BHLC.new_empty(0), references


def _first_exponents(k_BHLK: Tensor, mask_BL: Tensor, rows: _Rows) -> Tensor:
    """Returns M, the exponents of the first keys that are not padding: BHR, or none for ReLU."""
    if rows.bias_R is None:
        return rows.w_RK.new_empty(0)
    _, heads, _, width = k_BHLK.shape
    first_B111 = mask_BL.int().argmax(dim=1)[:, None, None, None]
    k_BHK = k_BHLK.gather(2, first_B111.expand(-1, heads, 1, width))[:, :, 0].float()
    # A sample may be all padding, which may be NaN.
    k_BHK = k_BHK.masked_fill(~mask_BL.any(dim=1)[:, None, None], 0)
    half_square_BH1 = k_BHK.square().sum(dim=-1, keepdim=True) * (0.5 * math.log2(math.e))
    return k_BHK @ rows.w_RK.mT - half_square_BH1 / width**0.5


def _causal_gradients(
    inputs: _Three, mask_BL: Tensor, rows: _Rows, saved: list[Tensor], dout_BHLC: Tensor
) -> _Three:
    q_BHLK, _, v_BHLC = inputs
    out_BHLC, totals_BHL, _, references = saved
    grid = Grid.of(q_BHLK, v_BHLC, rows.w_RK, CAUSAL)
    back = Grid.of(q_BHLK, v_BHLC, rows.w_RK, causal_blocks(q_BHLK.device))
    gradients = dq_BHLK, dk_BHLK, dv_BHLC = tuple(torch.empty_like(x) for x in inputs)
    q, k, v, out, dout = (vectors(x) for x in (*inputs, out_BHLC, dout_BHLC))
    dq, dk, dv = (vectors(x) for x in gradients)
    mask, along_BHL = bytes_of(mask_BL), torch.empty_like(totals_BHL)
    rows_and_m = *rows, references
    states = grid.states_like(v_BHLC)
    grid.over_features(causal_kernels.sum_keys, k, v, mask, *rows_and_m, *states)
    back.over_positions(
        causal_kernels.query_gradients,
        *(q, k, v, mask, *rows_and_m, *states, out, totals_BHL, dout, dq, along_BHL),
    )
    # The sums over the queries take the place of the states.
    grid.over_features(
        causal_kernels.sum_queries, *(q, mask, *rows_and_m, totals_BHL, dout, along_BHL, *states)
    )
    grid.over_positions(
        causal_kernels.value_gradients, *(q, k, mask, *rows_and_m, totals_BHL, dout, states[0], dv)
    )
    back.over_positions(
        causal_kernels.key_gradients,
        *(q, k, v, mask, *rows_and_m, totals_BHL, dout, along_BHL, *states, dk),
    )
    return dq_BHLK, dk_BHLK, dv_BHLC


@attention.register_fake
def _(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, *others: Any) -> _Four:
    _, w_RK, bias_R, _, causal = others
    shape, width = (*q_BHLK.shape[:2], len(w_RK)), v_BHLC.shape[-1]
    s_BHRC = v_BHLC.new_empty(0) if causal else v_BHLC.new_empty(*shape, width)
    z_BHR = w_RK.new_empty(0 if causal and bias_R is None else shape)
    return torch.empty_like(v_BHLC), w_RK.new_empty(q_BHLK.shape[:3]), s_BHRC, z_BHR


@_gradients.register_fake
def _(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, *others: Any) -> _Three:
    return torch.empty_like(q_BHLK), torch.empty_like(k_BHLK), torch.empty_like(v_BHLC)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.epsilon, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, dout_BHLC: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    # q, k, v, the mask, the rows and c are the first six.
    inputs, saved = ctx.saved_tensors[:6], list(ctx.saved_tensors[6:])
    gradients = _gradients(*inputs, ctx.epsilon, ctx.causal, saved, dout_BHLC)
    return *gradients, None, None, None, None, None


attention.register_autograd(_backward, setup_context=_save)
