"""The protein language model: embedding, blocks of attention and feed-forward, output layer.

Initial distributions (google-research/protein_lm): token embedding N(0, 1); position table
sinusoids; every matrix Xavier-uniform; biases 0; norms 1. The output layer is not tied.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from protlm.attention import Attention
from protlm.attention.base import State
from protlm.config import ModelConfig, NormOrder, Positions
from protlm.errors import UserError
from protlm.model.block import Block, OneStreamBlock, Rotation, norm_layer
from protlm.model.positions import Rotary, position_table
from protlm.model.reversible import ReversibleBlock, Streams
from protlm.model.selfattention import AttentionInputs


@dataclass(frozen=True)
class ModelOutput:
    """Logits, and the hidden states asked for: 0 the embedding, n the output of block n."""

    logits_BLV: Tensor
    hidden: dict[int, Tensor]


@final
@dataclass(frozen=True)
class DecodingState:
    """What the blocks keep of the first `length` positions; None before there are any."""

    length: int
    blocks: tuple[State | None, ...]

    def __getitem__(self, rows_B: Tensor) -> "DecodingState":
        """The state of some samples, by their numbers."""
        blocks = (None if state is None else state[rows_B] for state in self.blocks)
        return DecodingState(self.length, tuple(blocks))


class ProteinLM(nn.Module):
    """A transformer over tokens, around any attention mechanism.

    Args:
        config: sizes and choices.
        vocab_size: V.
        pad: the token that stands at padded positions.
        mechanism: makes the attention mechanism of a block from the block's number, 0 to N - 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        pad: int,
        mechanism: Callable[[int], Attention],
    ) -> None:
        super().__init__()
        head_dim, rest = divmod(config.model_dim, config.num_heads)
        if rest:
            raise UserError(
                f"model.model_dim={config.model_dim} is not a multiple of "
                f"model.num_heads={config.num_heads}; choose one that is"
            )
        self.reversible = config.reversible
        self._activation_checkpointing = False
        self.embedding = nn.Embedding(vocab_size, config.model_dim, padding_idx=pad)
        self.positions = position_table(
            config.positions, max_length=config.max_length, model_dim=config.model_dim
        )
        rotary = config.positions is Positions.rotary
        self.rotary = Rotary(head_dim=head_dim) if rotary else None
        self.dropout = nn.Dropout(config.dropout)
        block = ReversibleBlock if config.reversible else OneStreamBlock
        self.blocks = nn.ModuleList(
            block(config, mechanism(number)) for number in range(config.num_layers)
        )
        pre = config.norm_order is NormOrder.pre
        self.final_norm = norm_layer(config.norm, config.model_dim) if pre else nn.Identity()
        self.head = nn.Linear(config.model_dim, vocab_size)
        self.apply(_initialise)

    @property
    def num_layers(self) -> int:
        """Number of blocks, N."""
        return len(self.blocks)

    @property
    def activation_checkpointing(self) -> bool:
        """Whether each block's activations are computed again in the backward pass."""
        return self._activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, recompute: bool) -> None:
        if recompute and self.reversible:
            raise UserError(
                "model.reversible=true already computes the activations again in the backward "
                "pass; type trainer.activation_checkpointing=false, or model.reversible=false"
            )
        self._activation_checkpointing = recompute

    def forward(
        self,
        tokens_BL: Tensor,
        mask_BL: Tensor,
        *,
        causal: bool,
        layers: Sequence[int] = (),
    ) -> ModelOutput:
        """Returns logits for every position, and hidden states.

        Args:
            tokens_BL: token numbers, int64.
            mask_BL: true where there is a token, false at padding.
            causal: whether a position sees only itself and those before it.
            layers: which hidden states to return: 0 the embedding, n the output of block n.
                The last one is taken after the final norm, as in ESM.
        """
        hidden: dict[int, Tensor] = {}
        residual = self._enter(tokens_BL, recompute=torch.is_grad_enabled())
        rotation = self._rotation(tokens_BL)
        for number, block in enumerate(self.blocks, start=1):
            if number - 1 in layers:
                hidden[number - 1] = _hidden(residual)
            residual = self._run(block, residual, mask_BL, rotation, causal)
        x_BLD = self.final_norm(_hidden(residual))
        if self.num_layers in layers:
            hidden[self.num_layers] = x_BLD
        return ModelOutput(self.head(x_BLD), hidden)

    def initial_state(self) -> DecodingState:
        """The state before the first position, of any number of samples."""
        return DecodingState(0, (None,) * self.num_layers)

    def step(self, state: DecodingState, tokens_B: Tensor) -> tuple[DecodingState, Tensor]:
        """Takes the next token of every sample.

        Returns:
            The state after the token, and the logits of the token that follows, BV: those that
            `forward` with `causal=True` has there. The state that came in is used up.
        """
        start, tokens_B1 = state.length, tokens_B[:, None]
        residual = self._enter(tokens_B1, start)
        rotation = self._rotation(tokens_B1, start)
        blocks: list[State | None] = []
        for block, before in zip(self.blocks, state.blocks, strict=True):
            assert isinstance(block, Block)
            after, residual = block.step(before, residual, rotation)
            blocks.append(after)
        logits_B1V = self.head(self.final_norm(_hidden(residual)))
        return DecodingState(start + 1, tuple(blocks)), logits_B1V.squeeze(1)

    def attention_inputs(
        self, tokens_BL: Tensor, mask_BL: Tensor, *, causal: bool
    ) -> Iterator[tuple[int, AttentionInputs]]:
        """Yields, block after block, the block's number from 1 and what its mechanism sees.

        Only one block's inputs are alive at a time, so that maps can be streamed.
        """
        residual = self._enter(tokens_BL)
        rotation = self._rotation(tokens_BL)
        for number, block in enumerate(self.blocks, start=1):
            assert isinstance(block, Block)
            yield number, block.attention_inputs(residual, rotation)
            residual = block(residual, mask_BL, rotation, causal)

    def mechanism(self, number: int) -> Attention:
        """The attention mechanism of block `number`, from 1."""
        block = self.blocks[number - 1]
        assert isinstance(block, Block)
        return block.attention.mechanism

    def _enter(
        self, tokens_BL: Tensor, start: int = 0, *, recompute: bool = False
    ) -> Tensor | Streams:
        """What flows into the first block; `recompute` is for reversible blocks."""
        x_BLD = self.embedding(tokens_BL)
        if self.positions is not None:
            x_BLD = self.positions(x_BLD, start=start)
        x_BLD = self.dropout(x_BLD)
        return Streams(x_BLD, recompute=recompute) if self.reversible else x_BLD

    def _rotation(self, tokens_BL: Tensor, start: int = 0) -> Rotation:
        if self.rotary is None:
            return None
        return self.rotary.angles(start, start + tokens_BL.shape[1])

    def _run(
        self,
        block: nn.Module,
        residual: Tensor | Streams,
        mask_BL: Tensor,
        rotation: Rotation,
        causal: bool,
    ) -> Tensor | Streams:
        if self.activation_checkpointing and torch.is_grad_enabled():
            # The recomputation draws the same dropout: preserve_rng_state is on by default.
            return checkpoint(block, residual, mask_BL, rotation, causal, use_reentrant=False)
        return block(residual, mask_BL, rotation, causal)


def _hidden(residual: Tensor | Streams) -> Tensor:
    """The hidden state, BLD, of what flows out of a block."""
    return residual.mean() if isinstance(residual, Streams) else residual


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()


def num_parameters(network: nn.Module) -> int:
    """Trainable parameters of a network."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)
