"""Compares bidirectional FAVOR+ with two calls of PyTorch's fused softmax attention.

    python -m studies.two_flash [--quick] [--features 256] [--out outputs/two_flash.json]

With φ(x) = exp(ω·x̂ - ...) the sum over the keys is itself a softmax attention, of the rows ω to the
keys, and the outputs are another, of the queries to the rows:

    U_r, lse_r = softmax over j of (ω_r·k̂_j - |k̂_j|²/2), applied to v, and its log-sum-exp
    out_i      = softmax over r of (ω_r·q̂_i + lse_r), applied to U

This form needs no features in memory, no eps and no maximum. Decision 0006 records why protlm has
the explicit form of `protlm.attention.linearized` instead.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.attention_contenders import ours
from benchmarks.attention_passes import HEAD_DIM, Attend, Case, compare
from benchmarks.harness import (
    QUICK,
    Forecast,
    Pace,
    left_out_lines,
    machine,
    show,
    speed_table,
    write_json,
)

EXPLICIT = "performer_softmax"


class FlashWithLogSumExp(torch.autograd.Function):
    """Computes softmax(q kᵀ) v and its log-sum-exp with the kernel of the CPU."""

    @staticmethod
    def forward(ctx: Any, q_BHLK: Tensor, k_BHMK: Tensor, v_BHMK: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both, with scale 1; queries, keys and values have one width."""
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
        """Returns the gradients, with that of the log-sum-exp added through the sum of dO ∘ O.

        The kernel takes no gradient of the log-sum-exp and uses O for that sum only. So two more
        columns, [1, 1] of dO and the negated gradient (rounded, and the rest) of O, add it.
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
    """Returns bidirectional FAVOR+ without padding, BHLC; C = K."""
    scale = q_BHLK.shape[-1] ** -0.25
    q_BHLK, k_BHLK = q_BHLK * scale, k_BHLK * scale
    wide = torch.promote_types(k_BHLK.dtype, torch.float32)
    bias_BHL1 = -k_BHLK.to(wide).square().sum(-1, keepdim=True) / 2
    rows_BHRK = projection_RK.to(q_BHLK.dtype).expand(*q_BHLK.shape[:2], -1, -1)
    # A bias is two more columns of the keys (rounded, and the rest), multiplied by ones.
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


def two_flash(case: Case, features: int) -> Attend:
    """Builds the contender, whose rows are drawn once."""
    projection_RK = torch.randn(features, HEAD_DIM)

    def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        return two_flash_attention(q_BHLK, k_BHLK, v_BHLC, projection_RK)

    return attend


def _split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns x in a lower precision, and the remainder."""
    rounded = x.to(dtype)
    return rounded, (x - rounded.to(x.dtype)).to(dtype)


def main() -> None:
    """Measures both forms in turns, prints the ratios, and writes the JSON file."""
    parser = argparse.ArgumentParser(description="Compare two forms of bidirectional FAVOR+.")
    parser.add_argument("--quick", action="store_true", help="two short lengths, two rounds")
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("outputs/two_flash.json"))
    arguments = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.manual_seed(0)
    forms = {
        EXPLICIT: partial(ours, "performer_softmax", features=arguments.features),
        "two flash calls": partial(two_flash, features=arguments.features),
    }
    cpu, forecast = torch.device("cpu"), Forecast(most_seconds=5.0)
    pace = QUICK if arguments.quick else Pace(seconds=10.0, fewest=5, most=9, turn_seconds=0.2)
    held = [
        compare(forms, Case(causal=False, length=length, dtype="fp32", device=cpu), forecast, pace)
        for length in ((128, 256) if arguments.quick else (128, 512, 1024, 2048, 4096, 8192))
    ]
    show(machine(cpu), speed_table("FAVOR+, fp32", held, EXPLICIT), *left_out_lines(held))
    write_json(arguments.out, machine(cpu), {"bidirectional, fp32": held}, (EXPLICIT,))


if __name__ == "__main__":
    main()
