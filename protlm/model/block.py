"""A block of the transformer: attention and feed-forward around a residual."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor, nn

from protlm.attention import Attention
from protlm.attention.base import State
from protlm.config import ModelConfig, Norm, NormOrder
from protlm.model.feedforward import FeedForward
from protlm.model.selfattention import AttentionInputs, Context, SelfAttention, Tokens

Sublayer = Callable[[Tensor], Tensor]
# The residual between blocks: one stream, or two.
ResidualT = TypeVar("ResidualT")


def norm_layer(config: ModelConfig) -> nn.Module:
    """Returns a LayerNorm or an RMSNorm over the last axis."""
    if config.norm is Norm.rms:
        return nn.RMSNorm(config.model_dim, eps=config.norm_epsilon or 1e-6)
    return nn.LayerNorm(config.model_dim, eps=config.norm_epsilon or 1e-5)


class Block(nn.Module, ABC, Generic[ResidualT]):
    """Attention, then feed-forward, each with a norm and dropout; subclasses add the residual.

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

    def forward(self, residual: ResidualT, context: Context) -> ResidualT:
        """Returns the residual after the block."""

        def attend(y_BLD: Tensor) -> Tensor:
            return self.attention(y_BLD, context)

        residual = self._add(residual, attend, self.attention_norm)
        return self._add(residual, self.feedforward, self.feedforward_norm)

    def step(
        self, state: State | None, residual: ResidualT, context: Context
    ) -> tuple[State | None, ResidualT]:
        """Processes the next position; returns the state after it, and the residual."""

        def attend(y_B1D: Tensor) -> Tensor:
            nonlocal state
            state, out_B1D = self.attention.step(state, y_B1D, context)
            return out_B1D

        residual = self._add(residual, attend, self.attention_norm)
        return state, self._add(residual, self.feedforward, self.feedforward_norm)

    def attention_inputs(self, residual: ResidualT, context: Context) -> AttentionInputs:
        """Returns the inputs of the mechanism of this block for a residual."""
        return self.attention.inputs(self._attention_input(residual), context)

    @abstractmethod
    def _attention_input(self, residual: ResidualT) -> Tensor:
        """Returns the input of the attention sublayer, BLD."""

    @abstractmethod
    def _add(self, residual: ResidualT, sublayer: Sublayer, norm: nn.Module) -> ResidualT:
        """Adds a sublayer's output, after dropout, to the residual."""


class OneStreamBlock(Block[Tensor]):
    """The transformer's block: x + f(norm x), or norm(x + f(x)) with the norm after the sum."""

    def __init__(self, config: ModelConfig, mechanism: Attention, tokens: Tokens) -> None:
        super().__init__(config, mechanism, tokens)
        self.pre = config.norm_order is NormOrder.pre

    def _attention_input(self, residual: Tensor) -> Tensor:
        return self.attention_norm(residual) if self.pre else residual

    def _add(self, residual: Tensor, sublayer: Sublayer, norm: nn.Module) -> Tensor:
        if self.pre:
            return residual + self.dropout(sublayer(norm(residual)))
        return norm(residual + self.dropout(sublayer(residual)))
