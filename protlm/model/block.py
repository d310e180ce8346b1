"""A block of the transformer: attention and feed-forward around a residual."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor, nn

from protlm.attention import Attention
from protlm.attention.base import State
from protlm.config import ModelConfig, Norm, NormOrder
from protlm.model.feedforward import FeedForward
from protlm.model.selfattention import AttentionInputs, SelfAttention

Rotation = tuple[Tensor, Tensor] | None
Sublayer = Callable[[Tensor], Tensor]
# What flows from block to block: one stream, or two.
ResidualT = TypeVar("ResidualT")


def norm_layer(kind: Norm, width: int) -> nn.Module:
    """A LayerNorm or an RMSNorm over the last axis."""
    return nn.RMSNorm(width, eps=1e-6) if kind is Norm.rms else nn.LayerNorm(width)


class Block(nn.Module, ABC, Generic[ResidualT]):
    """Attention, then feed-forward, each with a norm and dropout; subclasses add up the residual.

    Args:
        config: sizes and choices.
        mechanism: the attention of this block.
    """

    def __init__(self, config: ModelConfig, mechanism: Attention) -> None:
        super().__init__()
        self.attention_norm = norm_layer(config.norm, config.model_dim)
        self.attention = SelfAttention(
            model_dim=config.model_dim,
            num_heads=config.num_heads,
            mechanism=mechanism,
            qk_norm=config.qk_norm,
        )
        self.feedforward_norm = norm_layer(config.norm, config.model_dim)
        self.feedforward = FeedForward(
            model_dim=config.model_dim,
            feedforward_dim=config.feedforward_dim,
            activation=config.activation,
            chunk=config.feedforward_chunk,
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, residual: ResidualT, mask_BL: Tensor, rotation: Rotation, causal: bool
    ) -> ResidualT:
        """Returns the residual after the block."""

        def attend(y_BLD: Tensor) -> Tensor:
            return self.attention(y_BLD, mask_BL, rotation=rotation, causal=causal)

        residual = self._add(residual, attend, self.attention_norm)
        return self._add(residual, self.feedforward, self.feedforward_norm)

    def step(
        self, state: State | None, residual: ResidualT, rotation: Rotation
    ) -> tuple[State | None, ResidualT]:
        """Takes the next position: the state after it, and the residual."""

        def attend(y_B1D: Tensor) -> Tensor:
            nonlocal state
            state, out_B1D = self.attention.step(state, y_B1D, rotation=rotation)
            return out_B1D

        residual = self._add(residual, attend, self.attention_norm)
        return state, self._add(residual, self.feedforward, self.feedforward_norm)

    def attention_inputs(self, residual: ResidualT, rotation: Rotation) -> AttentionInputs:
        """What the mechanism of this block sees when `residual` flows in."""
        return self.attention.inputs(self._attention_input(residual), rotation)

    @abstractmethod
    def _attention_input(self, residual: ResidualT) -> Tensor:
        """What the attention sees of the residual, BLD."""

    @abstractmethod
    def _add(self, residual: ResidualT, sublayer: Sublayer, norm: nn.Module) -> ResidualT:
        """Adds a sublayer's output, after dropout, to the residual."""


class OneStreamBlock(Block[Tensor]):
    """The transformer's block: x + f(norm x), or norm(x + f(x)) with the norm after the sum."""

    def __init__(self, config: ModelConfig, mechanism: Attention) -> None:
        super().__init__(config, mechanism)
        self.pre = config.norm_order is NormOrder.pre

    def _attention_input(self, residual: Tensor) -> Tensor:
        return self.attention_norm(residual) if self.pre else residual

    def _add(self, residual: Tensor, sublayer: Sublayer, norm: nn.Module) -> Tensor:
        if self.pre:
            return residual + self.dropout(sublayer(norm(residual)))
        return norm(residual + self.dropout(sublayer(residual)))
