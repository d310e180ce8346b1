"""Bidirectional FAVOR+ as two calls of PyTorch's fused softmax attention, to measure against.

With φ(x) = exp(ω·x̂ - ...) the sum over the keys is itself a softmax attention, of the rows ω to the
keys, and the outputs are another, of the queries to the rows:

    U_r, lse_r = softmax over j of (ω_r·k̂_j - |k̂_j|²/2), applied to v, and its log-sum-exp
    out_i      = softmax over r of (ω_r·q̂_i + lse_r), applied to U

Features never exist, and neither do an eps or a maximum. Whether this or the explicit form of
`protlm.attention.performer` is faster is a measurement: docs/decisions/0006.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.cases import HEAD_DIM, Attend, Case


class FlashWithLogSumExp(torch.autograd.Function):
    """softmax(q kᵀ) v and its log-sum-exp, both differentiable, by the fused kernel of the CPU."""

    @staticmethod
    def forward(ctx: Any, q_BHLK: Tensor, k_BHMK: Tensor, v_BHMK: Tensor) -> tuple[Tensor, Tensor]:
        """Scale 1; queries, keys and values of one width."""
        out_BHLK, lse_BHL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHLK, k_BHMK, v_BHMK, 0.0, False, attn_mask=None, scale=1.0
        )
        ctx.save_for_backward(q_BHLK, k_BHMK, v_BHMK, out_BHLK, lse_BHL)
        return out_BHLK, lse_BHL

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, ...]:
        """The kernel takes no gradient of the log-sum-exp: it goes in by the sum of dO ∘ O.

        That sum is all that the kernel uses O for, so two more columns [1, 1] of dO and of O the
        negated gradient, its rounding and the rest, add exactly what is missing.
        """
        dout_BHLK, dlse_BHL = grad_outputs
        q_BHLK, k_BHMK, v_BHMK, out_BHLK, lse_BHL = ctx.saved_tensors
        rounded, rest = _split(-dlse_BHL[..., None], out_BHLK.dtype)
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            F.pad(dout_BHLK, (0, 2), value=1.0),
            *(F.pad(x, (0, 2)) for x in (q_BHLK, k_BHMK, v_BHMK)),
            torch.cat([out_BHLK, rounded, rest], dim=-1),
            lse_BHL,
            0.0,
            False,
            attn_mask=None,
            scale=1.0,
        )
        return tuple(gradient[..., :-2] for gradient in gradients)


def two_flash_attention(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, projection_RK: Tensor
) -> Tensor:
    """Bidirectional FAVOR+ without padding, BHLC; C = K."""
    scale = q_BHLK.shape[-1] ** -0.25
    q_BHLK, k_BHLK = q_BHLK * scale, k_BHLK * scale
    wide = torch.promote_types(k_BHLK.dtype, torch.float32)
    bias_BHL1 = -k_BHLK.to(wide).square().sum(-1, keepdim=True) / 2
    rows_BHRK = projection_RK.to(q_BHLK.dtype).expand(*q_BHLK.shape[:2], -1, -1)
    # A bias is two more columns of the keys, its rounding and the rest, that meet ones.
    ones, no_values = (0, 2), F.pad(v_BHLC, (0, 2))
    sums_BHRC, lse_BHR = FlashWithLogSumExp.apply(  # pyright: ignore[reportGeneralTypeIssues]
        F.pad(rows_BHRK, ones, value=1.0),
        torch.cat([k_BHLK, *_split(bias_BHL1, k_BHLK.dtype)], dim=-1),
        no_values,
    )
    out_BHLC, _ = FlashWithLogSumExp.apply(  # pyright: ignore[reportGeneralTypeIssues]
        F.pad(q_BHLK, ones, value=1.0),
        torch.cat([rows_BHRK, *_split(lse_BHR[..., None], q_BHLK.dtype)], dim=-1),
        sums_BHRC,
    )
    return out_BHLC[..., :-2]


def two_flash(case: Case, device: torch.device) -> Attend:
    """The contender: rows are drawn once."""
    projection_RK = torch.randn(case.features or HEAD_DIM, HEAD_DIM, device=device)

    def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        return two_flash_attention(q_BHLK, k_BHLK, v_BHLC, projection_RK)

    return attend


def _split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in a lower precision, and what that leaves out."""
    rounded = x.to(dtype)
    return rounded, (x - rounded.to(x.dtype)).to(dtype)
