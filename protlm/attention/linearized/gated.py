"""Gated causal linear attention in chunks: S_t = g_t S_{t-1} + (1 - g_t) [v_t | 1]ᵀφ(k_t).

Peng et al., arXiv 2103.02143, section 3.2. Within a chunk of 64 positions the weights are a 64×64
product; between chunks, the states. A tile of chunks is computed at a time, under activation
checkpointing: only the state before each tile is kept for the backward pass.

Let c_t be the sum of log g from the first position of the chunk to t, t included. Within the chunk
φ(q_i)·φ(k_j) has the factor (1 - g_j) exp(c_i - c_j), and the state before the chunk the factor
exp(c_i). No exponent is above 0. A padded position has log g = 0 and writes nothing.

Tensors without a suffix are (1, heads, chunks, 64, width), the heads being those of all samples,
and states (1, heads, R, C + 1).
"""

from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from protlm.attention.linearized.chunks import chunked
from protlm.attention.linearized.features import FeatureMap, Features
from protlm.attention.linearized.normalization import inverse_of_weight
from protlm.attention.ops.numerics import no_autocast, upcast, zero_padding
from protlm.attention.ops.products import matrix_product
from protlm.attention.ops.tiles import CHUNK, tiles

# Gates closer to 0 or 1 than 3e-7 are not distinguished.
_LARGEST_LOGIT = 15.0


@final
class Gate(nn.Module):
    """The logits w·h + b of one gate per head, clamped to ±15.

    Initially w ~ N(0, 0.02²), and b is such that 1 / (1 - g) is 8 positions in the first head and
    512 in the last, in equal ratios: the lengths of a helix and of a protein.

    Args:
        num_heads: heads H.
        model_dim: width D of h.
    """

    def __init__(self, *, num_heads: int, model_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(num_heads, model_dim))
        memory_H = torch.logspace(3, 9, num_heads, base=2.0)
        self.bias = nn.Parameter((memory_H - 1).log())

    def forward(self, hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Returns the logits, BHL1, in float32 (float64 for float64); b at padding."""
        hidden_BLD = upcast(hidden_BLD.masked_fill(~mask_BL[..., None], 0))
        with no_autocast(hidden_BLD):
            weight, bias = self.weight.to(hidden_BLD.dtype), self.bias.to(hidden_BLD.dtype)
            logits_BLH = F.linear(hidden_BLD, weight, bias)
        return logits_BLH.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT).mT[..., None]


def gated_means(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    gate_BHL1: Tensor,
    mask_BL: Tensor,
    feature_map: FeatureMap,
) -> Tensor:
    """Returns the gated means of φ(q_i)·φ(k_j) [v_j | 1] over j ≤ i, (B, H, L, C + 1).

    The weights (1 - g_j) g_{j+1} … g_i sum to 1 - g_1 … g_i, by which the sums are divided: it
    would cancel in the output, but not in the floor of a denominator. In float32 (float64 for
    float64 queries). Clearing the padding and normalizing are left to the caller.

    Args:
        q_BHLK: queries in that dtype, finite at padding.
        k_BHLK: keys, likewise.
        v_BHLC: values.
        gate_BHL1: logits of the gates g, finite.
        mask_BL: true where there is a residue or special token.
        feature_map: the features, without a reference.
    """
    log_gate_BHL1 = zero_padding(F.logsigmoid(gate_BHL1), mask_BL)
    values = zero_padding(F.pad(v_BHLC.to(q_BHLK.dtype), (0, 1), value=1.0), mask_BL)
    operands = [x.flatten(0, 1)[None] for x in (q_BHLK, k_BHLK, values, log_gate_BHL1)]
    # States and their increments are as large as the features.
    num_features = feature_map.num_features(q_BHLK.shape[-1])
    group, *_ = tiles(operands[0], num_features=num_features, memory_divisor=2)
    heads, rows = group[0].heads.stop, group[0].rows.stop
    # The gradient of a split is one tensor; each slice would have one of the whole size.
    by_heads = zip(*(x.split(heads, dim=1) for x in operands), strict=True)
    sums = torch.cat([_sums(tensors, rows, feature_map) for tensors in by_heads], dim=1)
    weight_BHL1 = -torch.expm1(log_gate_BHL1.cumsum(dim=2))
    return sums.view(values.shape) * inverse_of_weight(weight_BHL1)


def _sums(operands: tuple[Tensor, ...], rows: int, feature_map: FeatureMap) -> Tensor:
    """Computes the gated sums of [v | 1] of some heads, a tile of rows at a time."""
    q, _, values, _ = operands
    num_features = feature_map.num_features(q.shape[-1])
    state, sums = values.new_zeros(1, values.shape[1], num_features, values.shape[-1]), []
    for tile in zip(*(x.split(rows, dim=2) for x in operands), strict=True):
        out, state = checkpoint(
            _tile_sums,
            *tile,
            state,
            feature_map,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        sums.append(out)
    return torch.cat(sums, dim=2)


def _tile_sums(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    log_gate: Tensor,
    state: Tensor,
    feature_map: FeatureMap,
) -> tuple[Tensor, Tensor]:
    """Returns the sums of a tile, and the state after it."""
    length = q.shape[2]
    phi_q, phi_k = (
        chunked(_DifferentiableFeatures.apply(x, features))
        for x, features in ((q, feature_map.queries), (k, feature_map.keys))
    )
    log_gate, values = chunked(log_gate), chunked(values)
    written = values * -torch.expm1(log_gate)
    log_decay = log_gate.cumsum(dim=3)
    left, kept = log_decay.exp(), (log_decay[..., -1:, :] - log_decay).exp()
    # Masked before the exponential, which would be infinite for the future.
    is_future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decays = (log_decay - log_decay.mT).masked_fill_(is_future, -torch.inf).exp_()
    increments = matrix_product(phi_k.mT, written * kept)
    states = []
    for increment, factor in zip(increments.unbind(2), left[..., -1:, :].unbind(2), strict=True):
        states.append(state)
        state = torch.addcmul(increment, state, factor)
    weights = matrix_product(phi_q, phi_k.mT) * decays
    # A single product as the last operation: recomputation ends before it.
    sums = matrix_product(
        torch.cat([left * phi_q, weights], dim=-1),
        torch.cat([torch.stack(states, dim=2), written], dim=-2),
    )
    return sums.flatten(2, 3)[:, :, :length], state


class _DifferentiableFeatures(torch.autograd.Function):
    """`apply(x, features)` returns the features of x, with their pullback as gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, features: Callable[[Tensor], Features]) -> Tensor:
        """Computes the features and keeps the pullback."""
        phi, ctx.pullback = features(x.contiguous())
        # Detached: a pullback that holds the output itself would be a reference cycle.
        return phi.detach()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        """Applies the pullback."""
        return ctx.pullback(*grad_outputs), None
