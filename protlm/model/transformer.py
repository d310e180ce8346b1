"""The protein language model: embedding, blocks of attention and feed-forward, output layer.

Initial distributions (google-research/protein_lm): token embedding N(0, 1); position table
sinusoids; every matrix Xavier-uniform; biases 0; norms 1. A token embedding that is also the
output layer is N(0, 1/D), and so are biases of distances. Value embeddings, convolutions and the
factors of skips start at 0.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from protlm.attention import ALTERNATING, Attention, create, mechanism, names
from protlm.attention.base import SharesParameters, State
from protlm.attention.layers import mechanisms_of, unable
from protlm.attention.relatives import SeesRelatives, View
from protlm.bounds import Bounds
from protlm.config import (
    HeadKind,
    ModelConfig,
    Norm,
    NormOrder,
    Positions,
    Relatives,
    RelativesPositions,
    RelativesSum,
)
from protlm.data.vocabulary import VOCABULARY, Vocabulary
from protlm.model.block import Block, norm_layer
from protlm.model.layers import HeadTransform, Linear, TiedHead, UnetSkips, drop_masked_tokens
from protlm.model.positions import PositionTable, RelativeBias, Rotary
from protlm.model.selfattention import (
    AttentionInputs,
    BlockContext,
    ValueEmbedding,
    heads_of_relatives,
)
from protlm.system.errors import OptionError, UserError, one_of

# Why an encoder is refused.
ENCODER = (
    "this model is an encoder without an output layer, and this needs predictions of residues; "
    "give a model that predicts them"
)


@dataclass(frozen=True)
class ModelOutput:
    """Logits, and the requested hidden states: 0 the embedding, n the output of block n."""

    logits: Tensor | None
    hidden: dict[int, Tensor]

    @property
    def logits_BLV(self) -> Tensor:  # noqa: N802
        """The logits; an encoder without an output layer has none, which is a `UserError`."""
        if self.logits is None:
            raise UserError(ENCODER)
        return self.logits


@final
@dataclass(frozen=True)
class FamilyState:
    """What a context leaves for the proteins after it: states of layers that see the family.

    It has one sample, and `length` positions of `proteins` proteins.
    """

    blocks: list[State | None]
    length: int
    proteins: int


@final
@dataclass(frozen=True)
class DecodingState:
    """The states of the blocks after `length` positions; None before the first.

    All samples follow the same family, if there is one.
    """

    length: int
    blocks: tuple[State | None, ...]
    family: FamilyState | None = None

    def __getitem__(self, rows_B: Tensor) -> "DecodingState":
        blocks = (None if state is None else state[rows_B] for state in self.blocks)
        return DecodingState(self.length, tuple(blocks), self.family)


class ProteinLM(nn.Module):
    """A transformer over tokens, around any attention mechanism.

    `mechanism` creates that of a block from its number, 0 to N - 1. `activation_checkpointing`
    recomputes each block's activations in the backward pass.
    """

    def __init__(
        self, config: ModelConfig, *, vocabulary: Vocabulary, mechanism: Callable[[int], Attention]
    ) -> None:
        super().__init__()
        vocab_size, dim, is_tied = len(vocabulary), config.model_dim, config.tied_head
        self.vocabulary = vocabulary
        self.activation_checkpointing = False
        self.relatives, self.relatives_positions = config.relatives, config.relatives_positions
        self.embedding = nn.Embedding(vocab_size, dim, padding_idx=vocabulary.pad)
        self.positions = PositionTable(config) if config.has_position_table else None
        self.token_dropout = config.token_dropout
        self.embedding_norm = norm_layer(config) if config.embedding_norm else None
        self.rotary = (
            Rotary(head_dim=config.width_of_head, stored=config.stored_frequencies)
            if config.positions is Positions.rotary
            else None
        )
        self.global_rotary = (
            Rotary(head_dim=config.width_of_head, base=config.global_base)
            if config.global_every
            else None
        )
        self.relative = RelativeBias(config) if config.positions is Positions.relative else None
        rows = config.relatives_numbers
        self.family_numbers = nn.Parameter(torch.zeros(rows, dim)) if rows else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, mechanism(number), vocabulary, number + 1)
            for number in range(config.num_layers)
        )
        if self.relative is not None:
            for number in range(config.num_layers):
                self.relative.check(self.mechanism(number + 1))
        self.skips = UnetSkips(config.num_layers) if config.unet_skips else None
        self.final_norm = (
            norm_layer(config) if config.norm_order is NormOrder.pre else nn.Identity()
        )
        head_norms = {HeadKind.dense_norm: config.norm, HeadKind.dense_layer_norm: Norm.layer}
        norm = head_norms.get(config.head)
        self.head_transform = (
            HeadTransform(model_dim=dim, norm=norm_layer(config, norm)) if norm else None
        )
        self.head = None
        if config.head is not HeadKind.none:
            self.head = TiedHead(vocab_size=vocab_size) if is_tied else Linear(dim, vocab_size)
        self.apply(_initialize)
        if is_tied:
            with torch.no_grad():
                self.embedding.weight /= math.sqrt(dim)
        # After all other weights, which the seed decides without them.
        self._see_families(config)

    def _see_families(self, config: ModelConfig) -> None:
        """Adds heads of relatives, and refuses settings with which no layer sees any."""
        attentions = [block.attention for block in self.blocks if isinstance(block, Block)]
        for number, attention in enumerate(attentions, start=1):
            if config.relatives_heads and config.sees_family(number):
                added = heads_of_relatives(config, self.vocabulary).apply(_initialize)
                nn.init.zeros_(added.output.weight)
                attention.relatives = added
        seeing = [one for one in attentions if one.sees_family or one.relatives]
        if config.relatives is not None and not seeing:
            raise UserError(
                f"no layer sees relatives: of {config.num_layers} layers, each one whose number is "
                f"a multiple of model.relatives_every={config.relatives_every} can, and windows "
                "with attention.relatives_window; type attention.relatives_window=16, "
                "model.relatives_heads=1 (not with objective=causal) or another attention"
            )
        is_apart = config.relatives_sum is RelativesSum.apart
        if seeing and is_apart and all(one.relatives_factor is None for one in seeing):
            raise UserError(
                "model.relatives_sum=apart has no effect on windows, whose softmax has the protein "
                "and its relatives; leave it out"
            )

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    def forward(
        self,
        tokens_BL: Tensor,
        mask_BL: Tensor,
        *,
        causal: bool,
        layers: Sequence[int] = (),
        bounds: Bounds | None = None,
        is_whole: bool = False,
        family: FamilyState | None = None,
    ) -> ModelOutput:
        """Returns logits for every position, and the hidden states of layers.

        Layer 0 is the embedding, n the output of block n, and the last one that of the final norm,
        as in ESM. With bounds, the rows have packed proteins, each computed as if it were alone, or
        seeing its family if the bounds have families and the model sees them. Each family of the
        rows then follows `family`, if it is given.
        With `is_whole`, the mask is true everywhere, which spares a GPU hiding padding.
        """
        hidden = self.hidden_states(
            tokens_BL,
            mask_BL,
            causal=causal,
            layers={*layers, self.num_layers},
            bounds=bounds,
            is_whole=is_whole,
            family=family,
        )
        asked = {layer: hidden[layer] for layer in hidden if layer in layers}
        return ModelOutput(self._logits(hidden[self.num_layers]), asked)

    def hidden_states(
        self,
        tokens_BL: Tensor,
        mask_BL: Tensor,
        *,
        causal: bool,
        layers: Collection[int],
        bounds: Bounds | None = None,
        is_whole: bool = False,
        family: FamilyState | None = None,
    ) -> dict[int, Tensor]:
        """Returns the hidden states of `forward`, BLD; later blocks and the head are not run."""
        context = self._context(
            tokens_BL, mask_BL, causal, bounds=bounds, is_whole=is_whole, family=family
        )
        hidden = self._hidden_states(context, layers, family)
        if bounds is None:
            return hidden
        return {number: x.reshape(*mask_BL.shape, -1) for number, x in hidden.items()}

    def read(
        self,
        tokens_BL: Tensor,
        mask_BL: Tensor,
        *,
        causal: bool,
        bounds: Bounds,
        family: FamilyState | None = None,
    ) -> FamilyState:
        """Reads the proteins of one family, after those that were read before; without gradients.

        The model's relatives are `ordered`: no protein sees those after it. The state of those that
        were read before must not be used again.
        """
        assert bounds.families is not None and len(bounds.families.spans) == 1
        context = self._context(tokens_BL, mask_BL, causal, bounds=bounds, family=family)
        assert context.view is not None and not context.view.later
        context = context._replace(view=context.view._replace(keeps=True))
        x_BLD = self._enter(context, family=family)
        before = FamilyState([None] * self.num_layers, 0, 0) if family is None else family

        def read(number: int, block: Block, *given: Any) -> tuple[State | None, Tensor]:
            found = block.read(*given)
            # The new state contains it; both of all blocks would take twice the memory.
            before.blocks[number] = None
            return found

        blocks, _ = self._through(x_BLD, context, family, read)
        length, proteins = before.length + int(mask_BL.sum()), before.proteins + len(bounds.spans)
        return FamilyState([*blocks], length, proteins)

    def _through(
        self,
        x_BLD: Tensor,
        context: BlockContext,
        family: FamilyState | None,
        run: Callable[[int, Block, Tensor, BlockContext], tuple[State | None, Tensor]],
    ) -> tuple[tuple[State | None, ...], Tensor]:
        """Returns the states that all blocks leave, and the residual after them."""
        states, early = list[State | None](), list[Tensor]()
        for number, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            if family is not None:
                context = context.with_state(family.blocks[number])
            state, x_BLD = run(number, block, self._skipped(x_BLD, early), context)
            states.append(state)
        return tuple(states), x_BLD

    def _hidden_states(
        self, context: BlockContext, layers: Collection[int], family: FamilyState | None = None
    ) -> dict[int, Tensor]:
        hidden: dict[int, Tensor] = {}
        x_BLD = self._enter(context, family=family)
        early: list[Tensor] = []
        for number, block in enumerate(self.blocks, start=1):
            if number - 1 in layers:
                hidden[number - 1] = x_BLD
            if number > max(layers):
                return hidden
            x_BLD = self._skipped(x_BLD, early)
            if family is not None:
                context = context.with_state(family.blocks[number - 1])
            if self.activation_checkpointing and torch.is_grad_enabled():
                # The recomputation draws the same dropout: preserve_rng_state is true by default.
                x_BLD = checkpoint(block, x_BLD, context, use_reentrant=False)
            else:
                x_BLD = block(x_BLD, context)
        hidden[self.num_layers] = self.final_norm(x_BLD)
        return hidden

    def initial_state(self, family: FamilyState | None = None) -> DecodingState:
        """Returns the state before the first position of a protein, for any number of samples."""
        return DecodingState(0, (None,) * self.num_layers, family)

    def step(self, state: DecodingState, tokens_B: Tensor) -> tuple[DecodingState, Tensor]:
        """Processes the next token of every sample; the input state must not be used again.

        Returns the state after it, and the logits of the following token, BV, equal to those of
        `forward` with `causal=True`.
        """
        start, tokens_B1, family = state.length, tokens_B[:, None], state.family
        mask_B1 = torch.ones_like(tokens_B1, dtype=torch.bool)
        context = self._context(tokens_B1, mask_B1, True, start, family=family)
        x_B1D = self._enter(context, start, family)
        blocks, x_B1D = self._through(
            x_B1D, context, family, lambda number, block, *x: block.step(state.blocks[number], *x)
        )
        out = ModelOutput(self._logits(self.final_norm(x_B1D)), {})
        return DecodingState(start + 1, blocks, family), out.logits_BLV.squeeze(1)

    def attention_inputs(
        self, tokens_BL: Tensor, mask_BL: Tensor, *, causal: bool, bounds: Bounds | None = None
    ) -> Iterator[tuple[int, AttentionInputs]]:
        """Yields the number of each block, from 1, and the inputs of its mechanism.

        Only the inputs of one block are in memory at a time, so that maps can be streamed.
        """
        context = self._context(tokens_BL, mask_BL, causal, bounds=bounds)
        x_BLD = self._enter(context)
        early: list[Tensor] = []
        for number, block in enumerate(self.blocks, start=1):
            assert isinstance(block, Block)
            x_BLD = self._skipped(x_BLD, early)
            yield number, block.attention_inputs(x_BLD, context)
            x_BLD = block(x_BLD, context)

    def mechanism(self, number: int) -> Attention:
        """Returns the attention mechanism of block `number`, from 1."""
        block = self.blocks[number - 1]
        assert isinstance(block, Block)
        return block.attention.mechanism

    @property
    def max_length(self) -> int | None:
        """The longest input of positions and mechanisms, in positions; None for no limit."""
        lengths = [self.mechanism(number).max_length for number in range(1, self.num_layers + 1)]
        if self.positions is not None:
            lengths.append(len(self.positions.table))
        return min((length for length in lengths if length is not None), default=None)

    def _enter(
        self, context: BlockContext, start: int = 0, family: FamilyState | None = None
    ) -> Tensor:
        x_BLD = self.embedding(context.tokens_BL)
        if self.family_numbers is not None:
            before = 0 if family is None else family.proteins
            x_BLD = x_BLD + self._numbers(self.family_numbers, context, before)
        if self.token_dropout:
            x_BLD = drop_masked_tokens(x_BLD, context.tokens_BL, context.mask_BL, context.bounds)
        if self.positions is not None:
            x_BLD = self.positions(x_BLD, start=start, bounds=context.bounds)
        if self.embedding_norm is not None:
            x_BLD = self.embedding_norm(x_BLD)
        return self.dropout(x_BLD)

    def _numbers(self, table: Tensor, context: BlockContext, before: int) -> Tensor:
        """Returns the rows of the numbers of proteins in their families, LD, or that of one."""
        bounds = context.bounds
        if context.view is None or bounds is None or bounds.families is None:
            return table[before]
        if not torch.compiler.is_compiling():
            last = max(one.stop - one.start for one in bounds.members) + before
            if last > len(table):
                raise UserError(
                    f"{last:,} proteins exceed the {len(table)} numbers of this model; give fewer"
                )
        segment_L, families = bounds.segment_L, bounds.families
        first_L = segment_L[families.cu_seqlens.long()[families.segment_L]]
        # Padding is of no protein.
        return table[(segment_L - first_L + before).clamp(max=len(table) - 1)]

    def _logits(self, x_BLD: Tensor) -> Tensor | None:
        if self.head is None:
            return None
        if self.head_transform is not None:
            x_BLD = self.head_transform(x_BLD)
        if isinstance(self.head, TiedHead):
            return self.head(x_BLD, self.embedding.weight)
        return self.head(x_BLD)

    def _context(
        self,
        tokens_BL: Tensor,
        mask_BL: Tensor,
        causal: bool,
        start: int = 0,
        *,
        bounds: Bounds | None = None,
        is_whole: bool = False,
        family: FamilyState | None = None,
    ) -> BlockContext:
        """Returns the context of rows from a position on, or of packed proteins, in one row.

        Samples that follow a family, without bounds, are at one position each.
        """
        packed = bounds
        if bounds is not None:
            tokens_BL, mask_BL = tokens_BL.reshape(1, -1), mask_BL.reshape(1, -1)
            position_L = bounds.position_L
        else:
            position_L = torch.arange(start, start + tokens_BL.shape[1], device=tokens_BL.device)
            if family is not None:
                spans = [(number, number + 1) for number in range(len(tokens_BL))]
                size = len(spans)
                packed = Bounds.of(spans, (1, size), longest=1, families=[1] * size)
        view, of_family_L = None, position_L
        if packed is not None and packed.families is not None and self.relatives is not None:
            view = View(packed, later=self.relatives is Relatives.full and not causal)
            if bounds is not None and self.relatives_positions is not RelativesPositions.restart:
                of_family_L = packed.families.position_L
            if family is not None and self.relatives_positions is RelativesPositions.run:
                of_family_L = of_family_L + family.length
        rotation = other = None if self.rotary is None else self.rotary.angles(position_L)
        rotary = self.global_rotary or self.rotary
        if rotary is not None and (rotary is not self.rotary or of_family_L is not position_L):
            other = rotary.angles(of_family_L)
        # Packed proteins may be padded one by one.
        is_whole = is_whole and bounds is None
        return BlockContext(
            tokens_BL, mask_BL, rotation, causal, other, bounds, is_whole, self.relative, view
        )

    def _skipped(self, x_BLD: Tensor, early: list[Tensor]) -> Tensor:
        """Returns the input of the next block, with its skip; `early` has the previous inputs."""
        return x_BLD if self.skips is None else self.skips(x_BLD, early)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, ValueEmbedding):
        nn.init.zeros_(module.weight)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()


def num_parameters(network: nn.Module) -> int:
    """Returns the number of trainable parameters of a network."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def _check_relatives(attention: dict[str, Any], num_layers: int) -> None:
    """Refuses a mechanism whose proteins cannot see relatives."""

    if found := unable(attention, num_layers, lambda kind: issubclass(kind, SeesRelatives)):
        able = [one for one in names() if issubclass(mechanism(one), SeesRelatives)] + [ALTERNATING]
        choose = f"train with model.relatives_heads=1 (if masked), or choose one of: {one_of(able)}"
        raise UserError(f"{found} cannot see relatives; {choose}")


def build_network(
    model: ModelConfig, attention: dict[str, Any], *, seed: int, vocabulary: Vocabulary = VOCABULARY
) -> ProteinLM:
    """Returns a network with new weights, a pure function of the config and the seed."""
    chosen = mechanisms_of(attention, model.num_layers)
    if model.relatives is not None and not model.relatives_heads:
        _check_relatives(attention, model.num_layers)
    first: dict[str, Attention] = {}

    def created(layer: int) -> Attention:
        name, options, group = chosen[layer]
        try:
            made = create(
                name,
                options,
                num_heads=model.num_heads,
                head_dim=model.width_of_head,
                model_dim=model.model_dim,
                max_length=model.max_length,
                # Layers draw different projections; the stride separates neighboring seeds.
                seed=seed * 100_003 + layer,
            )
        except OptionError as error:
            raise UserError(error.sentence(f"{group}.")) from error
        if first.setdefault(name, made) is not made and isinstance(made, SharesParameters):
            made.share_with(first[name])
        return made

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ProteinLM(model, vocabulary=vocabulary, mechanism=created)
