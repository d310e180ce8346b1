"""The attention sublayer: projections to heads, rotary angles, query-key norms, a mechanism."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.attention import Attention
from protlm.attention.base import Recurrent, State
from protlm.model.positions import rotate

# FAVOR+ estimates softmax while |q̂|² + |k̂|² stays below about 6, that is 3 for each.
_LARGEST_NORM = math.sqrt(3.0)


class QueryKeyNorm(nn.Module):
    """Scales queries and keys to a learnable norm per head that cannot exceed a bound.

    With q̂ = q·K^(-1/4) every query and key has |q̂| = s, 0 < s < √3, so that logits stay in
    [-s², s²] and the positive features of FAVOR+ keep a small variance. s starts at 1.
    """

    def __init__(self, *, num_heads: int) -> None:
        super().__init__()
        start = math.log(1.0 / (_LARGEST_NORM - 1.0))
        self.scale = nn.Parameter(torch.full((num_heads,), start))

    def forward(self, x_BHLK: Tensor) -> Tensor:
        """Returns queries or keys with the heads' norms."""
        wide = x_BHLK.to(torch.promote_types(x_BHLK.dtype, torch.float32))
        norm_H11 = (_LARGEST_NORM * torch.sigmoid(self.scale.to(wide.dtype)))[:, None, None]
        length_BHL1 = wide.square().sum(-1, keepdim=True).add(1e-12).sqrt()
        scaled = wide / length_BHL1 * norm_H11 * x_BHLK.shape[-1] ** 0.25
        return scaled.to(x_BHLK.dtype)


@dataclass(frozen=True)
class AttentionInputs:
    """What a mechanism sees in one block."""

    q_BHLK: Tensor
    k_BHLK: Tensor
    v_BHLC: Tensor
    hidden_BLD: Tensor


class SelfAttention(nn.Module):
    """Projects to heads, lets the mechanism mix the values, and projects back. No biases.

    A mechanism whose keys are its queries has no projection for keys.
    """

    def __init__(
        self, *, model_dim: int, num_heads: int, mechanism: Attention, qk_norm: bool
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(model_dim, model_dim, bias=False)
        shared = mechanism.shares_query_key
        self.key = None if shared else nn.Linear(model_dim, model_dim, bias=False)
        self.value = nn.Linear(model_dim, model_dim, bias=False)
        self.output = nn.Linear(model_dim, model_dim, bias=False)
        self.query_norm = QueryKeyNorm(num_heads=num_heads) if qk_norm else nn.Identity()
        has_key_norm = qk_norm and not shared
        self.key_norm = QueryKeyNorm(num_heads=num_heads) if has_key_norm else nn.Identity()
        self.mechanism = mechanism

    def inputs(self, hidden_BLD: Tensor, rotation: tuple[Tensor, Tensor] | None) -> AttentionInputs:
        """Queries, keys and values of a block's normalised input."""
        projections = [p for p in (self.query, self.key, self.value) if p is not None]
        # One product instead of three: the input is read once, and its gradient added up in there.
        joined = F.linear(hidden_BLD, torch.cat([p.weight for p in projections]))
        q_BHLK, *own_key, v_BHLC = map(self._heads, joined.chunk(len(projections), dim=-1))
        q_BHLK = self._turned(self.query_norm(q_BHLK), rotation)
        k_BHLK = q_BHLK
        if own_key:
            k_BHLK = self._turned(self.key_norm(own_key[0]), rotation)
        return AttentionInputs(q_BHLK, k_BHLK, v_BHLC, hidden_BLD)

    def forward(
        self,
        hidden_BLD: Tensor,
        mask_BL: Tensor,
        *,
        rotation: tuple[Tensor, Tensor] | None,
        causal: bool,
    ) -> Tensor:
        """Returns the sublayer's output, BLD."""
        mechanism = self.mechanism
        assert mechanism.supports_causal if causal else mechanism.supports_bidirectional
        x = self.inputs(hidden_BLD, rotation)
        mixed_BHLC = mechanism(
            x.q_BHLK, x.k_BHLK, x.v_BHLC, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal
        )
        return self.output(mixed_BHLC.transpose(1, 2).flatten(2))

    def step(
        self,
        state: State | None,
        hidden_B1D: Tensor,
        *,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> tuple[State, Tensor]:
        """Takes the next position: the mechanism's state after it, and the output, B1D.

        `state` is None at the first position.
        """
        mechanism = self.mechanism
        assert isinstance(mechanism, Recurrent)
        x = self.inputs(hidden_B1D, rotation)
        q_BHK, k_BHK, v_BHC = (y.squeeze(2) for y in (x.q_BHLK, x.k_BHLK, x.v_BHLC))
        before = mechanism.initial_state(k_BHK, v_BHC) if state is None else state
        hidden_BD = hidden_B1D.squeeze(1)
        after, mixed_BHC = mechanism.step(before, q_BHK, k_BHK, v_BHC, hidden_BD=hidden_BD)
        return after, self.output(mixed_BHC.flatten(1))[:, None]

    def _turned(self, x_BHLK: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        return x_BHLK if rotation is None else rotate(x_BHLK, *rotation)

    def _heads(self, x_BLD: Tensor) -> Tensor:
        return x_BLD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
