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
from protlm.config import ModelConfig, Norm, NormOrder, Positions
from protlm.errors import UserError
from protlm.model.feedforward import FeedForward
from protlm.model.positions import Rotary, position_table
from protlm.model.selfattention import AttentionInputs, SelfAttention


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


def _norm(kind: Norm, width: int) -> nn.Module:
    return nn.RMSNorm(width, eps=1e-6) if kind is Norm.rms else nn.LayerNorm(width)


class Block(nn.Module):
    """Attention and feed-forward, each with dropout, a residual sum and a norm before or after."""

    def __init__(self, config: ModelConfig, mechanism: Attention) -> None:
        super().__init__()
        self.pre = config.norm_order is NormOrder.pre
        self.attention_norm = _norm(config.norm, config.model_dim)
        self.attention = SelfAttention(
            model_dim=config.model_dim,
            num_heads=config.num_heads,
            mechanism=mechanism,
            qk_norm=config.qk_norm,
        )
        self.feedforward_norm = _norm(config.norm, config.model_dim)
        self.feedforward = FeedForward(
            model_dim=config.model_dim,
            feedforward_dim=config.feedforward_dim,
            activation=config.activation,
        )
        self.dropout = nn.Dropout(config.dropout)

    def attention_inputs(
        self, x_BLD: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> AttentionInputs:
        """What the mechanism of this block sees when the block sees `x_BLD`."""
        return self.attention.inputs(self.attention_norm(x_BLD) if self.pre else x_BLD, rotation)

    def forward(
        self,
        x_BLD: Tensor,
        mask_BL: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        causal: bool,
    ) -> Tensor:
        """Returns the residual stream after the block, BLD."""

        def attend(y_BLD: Tensor) -> Tensor:
            return self.attention(y_BLD, mask_BL, rotation=rotation, causal=causal)

        x_BLD = self._residual(x_BLD, attend, self.attention_norm)
        return self._residual(x_BLD, self.feedforward, self.feedforward_norm)

    def step(
        self, state: State | None, x_B1D: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[State | None, Tensor]:
        """Takes the next position: the state after it, and the residual stream, B1D."""

        def attend(y_B1D: Tensor) -> Tensor:
            nonlocal state
            state, out_B1D = self.attention.step(state, y_B1D, rotation=rotation)
            return out_B1D

        x_B1D = self._residual(x_B1D, attend, self.attention_norm)
        return state, self._residual(x_B1D, self.feedforward, self.feedforward_norm)

    def _residual(
        self, x_BLD: Tensor, sublayer: Callable[[Tensor], Tensor], norm: nn.Module
    ) -> Tensor:
        if self.pre:
            return x_BLD + self.dropout(sublayer(norm(x_BLD)))
        return norm(x_BLD + self.dropout(sublayer(x_BLD)))


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
        self.activation_checkpointing = False
        self.embedding = nn.Embedding(vocab_size, config.model_dim, padding_idx=pad)
        self.positions = position_table(
            config.positions, max_length=config.max_length, model_dim=config.model_dim
        )
        rotary = config.positions is Positions.rotary
        self.rotary = Rotary(head_dim=head_dim) if rotary else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, mechanism(number)) for number in range(config.num_layers)
        )
        pre = config.norm_order is NormOrder.pre
        self.final_norm = _norm(config.norm, config.model_dim) if pre else nn.Identity()
        self.head = nn.Linear(config.model_dim, vocab_size)
        self.apply(_initialise)

    @property
    def num_layers(self) -> int:
        """Number of blocks, N."""
        return len(self.blocks)

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
        x_BLD = self._embed(tokens_BL)
        rotation = self._rotation(tokens_BL)
        for number, block in enumerate(self.blocks, start=1):
            if number - 1 in layers:
                hidden[number - 1] = x_BLD
            x_BLD = self._run(block, x_BLD, mask_BL, rotation, causal)
        x_BLD = self.final_norm(x_BLD)
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
        x_BLD = self._embed(tokens_B1, start)
        rotation = self._rotation(tokens_B1, start)
        blocks: list[State | None] = []
        for block, before in zip(self.blocks, state.blocks, strict=True):
            assert isinstance(block, Block)
            after, x_BLD = block.step(before, x_BLD, rotation)
            blocks.append(after)
        logits_B1V = self.head(self.final_norm(x_BLD))
        return DecodingState(start + 1, tuple(blocks)), logits_B1V.squeeze(1)

    def attention_inputs(
        self, tokens_BL: Tensor, mask_BL: Tensor, *, causal: bool
    ) -> Iterator[tuple[int, AttentionInputs]]:
        """Yields, block after block, the block's number from 1 and what its mechanism sees.

        Only one block's inputs are alive at a time, so that maps can be streamed.
        """
        x_BLD = self._embed(tokens_BL)
        rotation = self._rotation(tokens_BL)
        for number, block in enumerate(self.blocks, start=1):
            assert isinstance(block, Block)
            yield number, block.attention_inputs(x_BLD, rotation)
            x_BLD = block(x_BLD, mask_BL, rotation, causal)

    def mechanism(self, number: int) -> Attention:
        """The attention mechanism of block `number`, from 1."""
        block = self.blocks[number - 1]
        assert isinstance(block, Block)
        return block.attention.mechanism

    def _embed(self, tokens_BL: Tensor, start: int = 0) -> Tensor:
        x_BLD = self.embedding(tokens_BL)
        if self.positions is not None:
            x_BLD = self.positions(x_BLD, start=start)
        return self.dropout(x_BLD)

    def _rotation(self, tokens_BL: Tensor, start: int = 0) -> tuple[Tensor, Tensor] | None:
        if self.rotary is None:
            return None
        return self.rotary.angles(start, start + tokens_BL.shape[1])

    def _run(
        self,
        block: nn.Module,
        x_BLD: Tensor,
        mask_BL: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        causal: bool,
    ) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            # The recomputation draws the same dropout: preserve_rng_state is on by default.
            return checkpoint(block, x_BLD, mask_BL, rotation, causal, use_reentrant=False)
        return block(x_BLD, mask_BL, rotation, causal)


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
