"""A block of the transformer: attention and feed-forward around a residual."""

from collections.abc import Callable

from torch import Tensor, nn

from protlm.attention import Attention
from protlm.attention.base import State
from protlm.config import ModelConfig, Norm, NormOrder
from protlm.model.feedforward import FeedForward
from protlm.model.selfattention import AttentionInputs, Context, SelfAttention, Tokens

Sublayer = Callable[[Tensor], Tensor]


def norm_layer(config: ModelConfig) -> nn.Module:
    """Returns a LayerNorm or an RMSNorm over the last axis."""
    if config.norm is Norm.rms:
        return nn.RMSNorm(config.model_dim, eps=config.norm_epsilon or 1e-6)
    return nn.LayerNorm(config.model_dim, eps=config.norm_epsilon or 1e-5)


class Block(nn.Module):
    """Attention, then feed-forward: x + f(norm x), or norm(x + f(x)) with the norm after the sum.

    Args:
        config: sizes and choices.
        mechanism: the attention of this block.
        tokens: the size of the vocabulary and the padding token.
    """

    def __init__(self, config: ModelConfig, mechanism: Attention, tokens: Tokens) -> None:
        super().__init__()
        self.attention_norm = norm_layer(config)
        self.attention = SelfAttention(config, mechanism, tokens)
        self.feedforward_norm = norm_layer(config)
        self.feedforward = FeedForward(
            model_dim=config.model_dim,
            feedforward_dim=config.feedforward_dim,
            activation=config.activation,
            chunk=config.feedforward_chunk,
        )
        self.dropout = nn.Dropout(config.dropout)
        self.pre = config.norm_order is NormOrder.pre

    def forward(self, x_BLD: Tensor, context: Context) -> Tensor:
        """Returns the residual, BLD, after the block."""

        def attend(y_BLD: Tensor) -> Tensor:
            return self.attention(y_BLD, context)

        x_BLD = self._add(x_BLD, attend, self.attention_norm)
        return self._add(x_BLD, self.feedforward, self.feedforward_norm)

    def step(
        self, state: State | None, x_B1D: Tensor, context: Context
    ) -> tuple[State | None, Tensor]:
        """Processes the next position; returns the state after it, and the residual."""

        def attend(y_B1D: Tensor) -> Tensor:
            nonlocal state
            state, out_B1D = self.attention.step(state, y_B1D, context)
            return out_B1D

        x_B1D = self._add(x_B1D, attend, self.attention_norm)
        return state, self._add(x_B1D, self.feedforward, self.feedforward_norm)

    def attention_inputs(self, x_BLD: Tensor, context: Context) -> AttentionInputs:
        """Returns the inputs of the mechanism of this block for a residual."""
        return self.attention.inputs(self.attention_norm(x_BLD) if self.pre else x_BLD, context)

    def _add(self, x_BLD: Tensor, sublayer: Sublayer, norm: nn.Module) -> Tensor:
        """Adds a sublayer's output, after dropout, to the residual."""
        if self.pre:
            return x_BLD + self.dropout(sublayer(norm(x_BLD)))
        return norm(x_BLD + self.dropout(sublayer(x_BLD)))
