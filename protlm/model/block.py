"""A block of the transformer: attention and feed-forward around a residual."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from protlm.attention import Attention
from protlm.attention.base import State
from protlm.config import Activation, ModelConfig, Norm, NormOrder
from protlm.data.vocabulary import Vocabulary
from protlm.model.layers import Linear
from protlm.model.selfattention import AttentionInputs, BlockContext, SelfAttention


class FeedForward(nn.Module):
    """Down(ReLU or GELU(Up x)), or Down(SiLU or GELU(Gate x) * Up x) (arXiv 2002.05202).

    GEGLU has the approximation of GELU by tanh, as T5 has. With `feedforward_chunk`, as many
    positions are computed at a time, and recomputed in the backward pass, so that no tensor of all
    positions has the width F (Reformer, arXiv 2001.04451, section 3).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, inner, self.activation = config.model_dim, config.feedforward_dim, config.activation
        gated = self.activation in (Activation.swiglu, Activation.geglu)
        self.chunk = config.feedforward_chunk
        self.up = Linear(dim, inner, bias=not gated)
        self.gate = Linear(dim, inner, bias=False) if gated else None
        self.down = Linear(inner, dim, bias=not gated)

    def forward(self, x_BLD: Tensor) -> Tensor:
        if self.chunk is None or torch.compiler.is_exporting():
            return self._all_at_once(x_BLD)
        kind = x_BLD.device.type
        is_mixed, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # With one copy of a weight for all chunks, autocast would add up their gradients in the
        # dtype of the copy. Each chunk casts for itself, and the sum has the weight's dtype.
        with torch.autocast(kind, dtype=dtype, enabled=is_mixed, cache_enabled=False):
            return torch.cat([*map(self._recomputed, x_BLD.split(self.chunk, dim=1))], dim=1)

    def _recomputed(self, chunk_BMD: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._all_at_once(chunk_BMD)
        # The sublayer draws no random numbers.
        return checkpoint(
            self._all_at_once, chunk_BMD, use_reentrant=False, preserve_rng_state=False
        )

    def _all_at_once(self, x_BLD: Tensor) -> Tensor:
        up_BLF = self.up(x_BLD)
        if self.gate is not None:
            gate_BLF, is_swiglu = self.gate(x_BLD), self.activation is Activation.swiglu
            gate_BLF = F.silu(gate_BLF) if is_swiglu else F.gelu(gate_BLF, approximate="tanh")
            return self.down(gate_BLF * up_BLF)
        return self.down(F.gelu(up_BLF) if self.activation is Activation.gelu else F.relu(up_BLF))


Sublayer = Callable[[Tensor], Tensor]


def norm_layer(config: ModelConfig, norm: Norm | None = None) -> nn.Module:
    """Returns a LayerNorm or an RMSNorm over the last axis: that of the model, or one asked for."""
    if (norm or config.norm) is Norm.rms:
        return nn.RMSNorm(config.model_dim, eps=config.norm_epsilon or 1e-6)
    return nn.LayerNorm(config.model_dim, eps=config.norm_epsilon or 1e-5)


class Block(nn.Module):
    """Attention, then feed-forward: x + f(norm x), or norm(x + f(x)) with the norm after."""

    def __init__(
        self, config: ModelConfig, mechanism: Attention, vocabulary: Vocabulary, layer: int
    ) -> None:
        super().__init__()
        self.attention_norm = norm_layer(config)
        self.attention = SelfAttention(config, mechanism, vocabulary, layer)
        self.feedforward_norm = norm_layer(config)
        self.feedforward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)
        self.pre = config.norm_order is NormOrder.pre

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        x_BLD = self._add(x_BLD, lambda y_BLD: self.attention(y_BLD, context), self.attention_norm)
        return self._add(x_BLD, self.feedforward, self.feedforward_norm)

    def step(
        self, state: State | None, x_B1D: Tensor, context: BlockContext
    ) -> tuple[State | None, Tensor]:
        """Processes the next position; returns the state after it, and the residual."""
        return self._with_state(lambda y_B1D: self.attention.step(state, y_B1D, context), x_B1D)

    def read(self, x_BLD: Tensor, context: BlockContext) -> tuple[State | None, Tensor]:
        """Returns what relatives leave for the proteins after them, and the residual."""
        return self._with_state(lambda y_BLD: self.attention.read(y_BLD, context), x_BLD)

    def _with_state(
        self, attention: Callable[[Tensor], tuple[State | None, Tensor]], x_BLD: Tensor
    ) -> tuple[State | None, Tensor]:
        state: State | None = None

        def attend(y_BLD: Tensor) -> Tensor:
            nonlocal state
            state, out_BLD = attention(y_BLD)
            return out_BLD

        x_BLD = self._add(x_BLD, attend, self.attention_norm)
        return state, self._add(x_BLD, self.feedforward, self.feedforward_norm)

    def attention_inputs(self, x_BLD: Tensor, context: BlockContext) -> AttentionInputs:
        """Returns the inputs of the mechanism of this block for a residual."""
        x_BLD = self.attention_norm(x_BLD) if self.pre else x_BLD
        return self.attention.all_inputs(x_BLD, context)

    def _add(self, x_BLD: Tensor, sublayer: Sublayer, norm: nn.Module) -> Tensor:
        if self.pre:
            return x_BLD + self.dropout(sublayer(norm(x_BLD)))
        return norm(x_BLD + self.dropout(sublayer(x_BLD)))
