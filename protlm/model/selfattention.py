"""The attention sublayer: projections to heads, rotary angles, query-key norms, a mechanism."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.attention import Attention
from protlm.attention.base import Context, QueryKeyNorms, Recurrent, State
from protlm.attention.ops.numerics import upcast
from protlm.attention.relatives import SeesRelatives, View
from protlm.attention.window import SlidingWindow
from protlm.bounds import Bounds
from protlm.config import ModelConfig, QueryKeyWidth, Relatives, RelativesPositions, RelativesSum
from protlm.data.vocabulary import Vocabulary
from protlm.model.layers import Linear, ShortConvolution, is_plain, linear
from protlm.model.positions import rotate
from protlm.system.errors import UserError

# Part of the name of every weight of a mechanism.
MECHANISM = ".attention.mechanism."
# And of every weight of heads of relatives.
HEADS_OF_RELATIVES = ".attention.relatives."
# FAVOR+ estimates softmax well while |q̂|² + |k̂|² is below about 6, that is 3 for each.
_LARGEST_NORM = math.sqrt(3.0)


class BoundedNorm(nn.Module):
    """Scales queries and keys to a learnable norm per head that cannot exceed a bound.

    With q̂ = q·K^(-1/4) every query and key has |q̂| = s, 0 < s < √3, so that logits stay in
    [-s², s²] and the positive features of FAVOR+ keep a small variance. s starts at 1.
    """

    def __init__(self, *, num_heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((num_heads,), math.log(1.0 / (_LARGEST_NORM - 1.0))))

    def forward(self, x_BHLK: Tensor) -> Tensor:
        x = upcast(x_BHLK)
        norm_H11 = self.norms(self.scale.to(x.dtype))[:, None, None]
        length_BHL1 = x.square().sum(-1, keepdim=True).add(1e-12).sqrt()
        return (x / length_BHL1 * norm_H11 * x_BHLK.shape[-1] ** 0.25).to(x_BHLK.dtype)

    @staticmethod
    def norms(scale_H: Tensor) -> Tensor:
        return _LARGEST_NORM * torch.sigmoid(scale_H)


class FreeNorm(nn.Module):
    """Scales queries and keys to root mean square 1, times a learnable gain per head.

    A query-key norm as in ViT-22B (arXiv 2302.05442, section 2) and ESM C: logits are q·k / √K of
    such vectors, within √K times the gains of queries and keys, which start at 1, without a bound.
    """

    def __init__(self, *, num_heads: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(num_heads))

    def forward(self, x_BHLK: Tensor) -> Tensor:
        x = upcast(x_BHLK)
        inverse_BHL1 = x.square().mean(-1, keepdim=True).add(1e-12).rsqrt()
        return (x * inverse_BHL1 * self.gain.to(x.dtype)[:, None, None]).to(x_BHLK.dtype)


class WidthNorm(nn.LayerNorm):
    """LayerNorm without bias over the queries or keys of all heads together, as in ESM C."""

    def __init__(self, config: ModelConfig) -> None:
        width = config.num_heads * config.width_of_head
        super().__init__(width, eps=config.norm_epsilon or 1e-5, bias=False)

    def forward(self, x_BHLK: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        joined_BLD = super().forward(x_BHLK.transpose(1, 2).flatten(2))
        return joined_BLD.unflatten(-1, (x_BHLK.shape[1], -1)).transpose(1, 2)


class NormsByKind(nn.Module):
    """Free norms of the first heads, which have softmax weights, and other norms of the others."""

    def __init__(self, *, num_exact_heads: int, linear: nn.Module) -> None:
        super().__init__()
        self.exact, self.linear = FreeNorm(num_heads=num_exact_heads), linear

    def forward(self, x_BHLK: Tensor) -> Tensor:
        near, far = x_BHLK.tensor_split([len(self.exact.gain)], dim=1)
        return torch.cat([self.exact(near), self.linear(far)], dim=1)


_NORMS: Mapping[QueryKeyNorms, Callable[..., nn.Module]] = {
    QueryKeyNorms.bounded: BoundedNorm,
    QueryKeyNorms.free: FreeNorm,
    QueryKeyNorms.none: lambda num_heads: nn.Identity(),
}


class BlockContext(NamedTuple):
    """What all blocks of a pass have in common; a rotation is cosines and sines, each LK.

    Bounds are those of packed proteins, whose rows are joined. Layers of the family have the other
    rotation, and what their proteins see of each other, if they do; so have layers of E1 with
    another base. `is_whole` and `logit_bias` are those of the `Context` of a mechanism.
    """

    tokens_BL: Tensor
    mask_BL: Tensor
    rotation: tuple[Tensor, Tensor] | None
    causal: bool
    other_rotation: tuple[Tensor, Tensor] | None = None
    bounds: Bounds | None = None
    is_whole: bool = False
    logit_bias: Callable[[int, slice], Tensor] | None = None
    view: View | None = None

    def with_state(self, entering: State | None) -> "BlockContext":
        """Returns the context of a block which a context of relatives has left a state."""
        assert self.view is not None
        return self._replace(view=self.view._replace(entering=entering))


@dataclass(frozen=True)
class AttentionInputs:
    """A mechanism in one block, and its inputs.

    Those of a layer that sees the family are of one family, whose last protein, from the position
    `own` on, is the query. `relatives` are those of heads of relatives beside the mechanism.
    """

    mechanism: Attention
    q_BHLK: Tensor
    k_BHLK: Tensor
    v_BHLC: Tensor
    context: Context
    view: View | None = None
    own: int = 0
    relatives: "AttentionInputs | None" = None

    def map_rows(self, rows: slice) -> Tensor:
        """Returns some rows of the query's map, over all keys, BHML."""
        mechanism, given = self.mechanism, (self.q_BHLK, self.k_BHLK, self.context)
        if self.view is None:
            return mechanism.attention_map(*given, rows)
        assert isinstance(mechanism, SeesRelatives)
        rows = slice(self.own + rows.start, self.own + rows.stop)
        return mechanism.family_rows(*given, self.view, rows)

    def of_query(self, start: int) -> "AttentionInputs":
        """Returns those of the protein that begins at a position, with the family if it sees it."""
        if self.view is not None:
            return replace(self, own=start)
        q, k, v = (x[:, :, start:] for x in (self.q_BHLK, self.k_BHLK, self.v_BHLC))
        others = self.relatives and self.relatives.of_query(start)
        context = self.context.of_positions(start)
        return AttentionInputs(self.mechanism, q, k, v, context, relatives=others)


@final
@dataclass(frozen=True)
class SublayerState:
    """The states of the mechanism and of the convolution, its previous inputs, in a sublayer."""

    mechanism: State
    recent_BMD: Tensor | None

    def __getitem__(self, rows_B: Tensor) -> "SublayerState":
        recent = self.recent_BMD
        return SublayerState(self.mechanism[rows_B], None if recent is None else recent[rows_B])


class ValueEmbedding(nn.Embedding):
    """An embedding of the tokens that is added to a layer's values; it starts at 0.

    It gives the values direct access to the residue in every block (as in the NanoGPT speed runs,
    where it is mixed by a learned scalar).
    """


class SelfAttention(nn.Module):
    """The attention sublayer: projections to heads, a mechanism, and an output projection.

    A mechanism whose keys are its queries has no projection for keys. Options for every mechanism:

    * biases in the projections, and a bound of their absolute values;
    * another rotary base in each layer whose number, from 1, is a multiple of `global_every`;
    * a short convolution of the input, before the projections;
    * a value embedding;
    * heads of relatives, a sublayer of their own beside this one, which adds what they see in their
      family; its output projection starts at 0 (as the gates of Flamingo do, arXiv 2204.14198,
      section 2.2), and a protein without relatives has nothing added;
    * an output gate: out = RMSNorm(mixed) ⊙ SiLU(G x) with a norm for each head (RetNet, arXiv
      2307.08621, equation 8). The norm cancels any positive factor of a row, as the denominator of
      linear attention (TransNormer, arXiv 2210.10340, section 3.2).
    """

    def __init__(
        self, config: ModelConfig, mechanism: Attention, vocabulary: Vocabulary, layer: int = 1
    ) -> None:
        super().__init__()
        self.clip, every = config.qkv_clip, config.global_every
        self.is_global = every > 0 and layer % every == 0
        dim, self.num_heads = config.model_dim, config.num_heads
        inner = self.num_heads * config.width_of_head
        bias, shared = config.attention_bias, mechanism.shares_query_key
        self.query = Linear(dim, inner, bias=bias)
        self.key = None if shared else Linear(dim, inner, bias=bias)
        self.value = Linear(dim, inner, bias=bias)
        self.output = Linear(inner, dim, bias=bias)
        self.query_norm = _query_key_norm(config, mechanism)
        self.key_norm = nn.Identity() if shared else _query_key_norm(config, mechanism)
        width = config.convolution
        self.convolution = ShortConvolution(model_dim=dim, width=width) if width else None
        self.value_embedding = (
            ValueEmbedding(len(vocabulary), inner, padding_idx=vocabulary.pad)
            if config.value_embedding
            else None
        )
        self.gate = Linear(dim, inner, bias=False) if config.output_gate else None
        self.output_norm = (
            nn.RMSNorm(config.width_of_head, eps=1e-6) if config.output_gate else None
        )
        self.mechanism = mechanism
        self.sees_family, self.relatives_factor = False, None
        self.relatives: SelfAttention | None = None
        sees_family = config.sees_family(layer) and not config.relatives_heads
        if sees_family and isinstance(mechanism, SeesRelatives):
            # Of a pattern, windows may see the protein alone in any layer.
            self.sees_family = mechanism.sees_relatives
            is_apart = config.relatives_sum is RelativesSum.apart
            refusal = mechanism.relatives_refusal(
                later=config.relatives is Relatives.full,
                apart=is_apart,
                runs=config.relatives_positions is RelativesPositions.run,
            )
            if refusal:
                raise UserError(refusal)
            if is_apart and self.sees_family and mechanism.sums_apart:
                self.relatives_factor = nn.Parameter(torch.zeros(self.num_heads))

    def all_inputs(self, hidden_BLD: Tensor, context: BlockContext) -> AttentionInputs:
        """Returns the inputs with those of heads of relatives, if these see some."""
        x = self.inputs(hidden_BLD, context)
        if self.relatives is None or context.view is None:
            return x
        return replace(x, relatives=self.relatives.inputs(hidden_BLD, context))

    def inputs(self, hidden_BLD: Tensor, context: BlockContext) -> AttentionInputs:
        if self.convolution is not None:
            hidden_BLD = self.convolution(
                hidden_BLD, context.mask_BL, causal=context.causal, bounds=context.bounds
            )
        return self._projected(hidden_BLD, context)

    def _projected(self, hidden_BLD: Tensor, context: BlockContext) -> AttentionInputs:
        projections = [p for p in (self.query, self.key, self.value) if p is not None]
        if all(map(is_plain, projections)):
            # One product instead of three: the input is read once, its gradient summed in it.
            biases: list[Tensor] = [p.bias for p in projections if p.bias is not None]
            joined = linear(
                hidden_BLD,
                torch.cat([p.weight for p in projections]),
                torch.cat(biases) if biases else None,
            )
            projected = joined.chunk(len(projections), dim=-1)
        else:
            projected = tuple(p(hidden_BLD) for p in projections)
        if self.clip is not None:
            projected = tuple(x_BLE.clamp(-self.clip, self.clip) for x_BLE in projected)
        query_BLE, *key_BLE, value_BLE = projected
        if self.value_embedding is not None:
            value_BLE = value_BLE + self.value_embedding(context.tokens_BL)
        q_BHLK = self._rotated(self.query_norm(self._heads(query_BLE)), context)
        k_BHLK = (
            self._rotated(self.key_norm(self._heads(key_BLE[0])), context) if key_BLE else q_BHLK
        )
        given = Context(
            hidden_BLD, context.mask_BL, context.causal, context.is_whole, context.logit_bias
        )
        view = None
        if self.sees_family and context.view is not None:
            view = context.view._replace(factor_H=self.relatives_factor)
        return AttentionInputs(self.mechanism, q_BHLK, k_BHLK, self._heads(value_BLE), given, view)

    def forward(self, hidden_BLD: Tensor, context: BlockContext) -> Tensor:
        mechanism, causal = self.mechanism, context.causal
        assert mechanism.supports_causal if causal else mechanism.supports_bidirectional
        return self.read(hidden_BLD, context)[1]

    def read(self, hidden_BLD: Tensor, context: BlockContext) -> tuple[State | None, Tensor]:
        """Returns what the proteins leave for those that follow in their family, and the output."""
        x = self.inputs(hidden_BLD, context)
        state, heads = None, (x.q_BHLK, x.k_BHLK, x.v_BHLC)
        if x.view is not None:
            assert isinstance(self.mechanism, SeesRelatives)
            mixed_BHLC, state = self.mechanism.forward_family(heads, x.context, x.view)
        else:
            mixed_BHLC = self.mechanism(*heads, x.context, context.bounds)
        out_BLD = self._out(mixed_BHLC.transpose(1, 2), x.context.hidden_BLD)
        if self.relatives is not None and context.view is not None:
            state, of_relatives_BLD = self.relatives.read(hidden_BLD, context)
            out_BLD = out_BLD + of_relatives_BLD
        return state, out_BLD

    def step(
        self, state: State | None, hidden_B1D: Tensor, context: BlockContext
    ) -> tuple[State, Tensor]:
        """Processes the next position; returns the state after it, and the output, B1D.

        `state` is None at the first position.
        """
        mechanism = self.mechanism
        assert isinstance(mechanism, Recurrent)
        assert state is None or isinstance(state, SublayerState)
        recent_BMD = None if state is None else state.recent_BMD
        if self.convolution is not None:
            recent_BMD, hidden_B1D = self.convolution.step(recent_BMD, hidden_B1D)
        x = self._projected(hidden_B1D, context)
        q_BHK, k_BHK, v_BHC = (y.squeeze(2) for y in (x.q_BHLK, x.k_BHLK, x.v_BHLC))
        before = self._first_state(k_BHK, v_BHC, context) if state is None else state.mechanism
        after, mixed_BHC = mechanism.step(before, q_BHK, k_BHK, v_BHC, x.context)
        if self.relatives_factor is not None and context.view is not None:
            assert isinstance(mechanism, SeesRelatives)
            # Samples are proteins of one row, which share the context.
            heads = [y.transpose(0, 2) for y in (x.q_BHLK, x.k_BHLK, x.v_BHLC)]
            row = x.context._replace(mask_BL=x.context.mask_BL.mT)
            others_1HBC, _ = mechanism.across(heads, row, context.view, own=False)
            factor_H11 = self.relatives_factor.to(mixed_BHC.dtype)[:, None, None]
            mixed_BHC = mixed_BHC + (factor_H11 * others_1HBC[0]).transpose(0, 1)
        return SublayerState(after, recent_BMD), self._out(mixed_BHC[:, None], hidden_B1D)

    def _first_state(self, k_BHK: Tensor, v_BHC: Tensor, context: BlockContext) -> State:
        mechanism, view = self.mechanism, context.view
        if self.sees_family and view is not None and isinstance(mechanism, SeesRelatives):
            is_apart = self.relatives_factor is not None
            return mechanism.entered(view.entering, k_BHK, v_BHC, apart=is_apart)
        assert isinstance(mechanism, Recurrent)
        return mechanism.initial_state(k_BHK, v_BHC)

    def _out(self, mixed_BLHC: Tensor, hidden_BLD: Tensor) -> Tensor:
        if self.gate is None or self.output_norm is None:
            return self.output(mixed_BLHC.flatten(2))
        return self.output(self.output_norm(mixed_BLHC).flatten(2) * F.silu(self.gate(hidden_BLD)))

    def _rotated(self, x_BHLK: Tensor, context: BlockContext) -> Tensor:
        # All heads of a layer, also those that see the protein alone, have the same positions.
        sees_other = self.is_global or (self.sees_family and context.view is not None)
        rotation = context.other_rotation if sees_other else context.rotation
        if rotation is None or not self.mechanism.takes_rotary:
            return x_BHLK
        return rotate(x_BHLK, *rotation)

    def _heads(self, x_BLD: Tensor) -> Tensor:
        return x_BLD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def heads_of_relatives(config: ModelConfig, vocabulary: Vocabulary) -> SelfAttention:
    """Returns the sublayer of `relatives_heads`, whose heads are as wide as the others."""
    config = replace(
        config,
        num_heads=config.relatives_heads,
        head_dim=config.width_of_head,
        relatives_heads=0,
        relatives_every=1,
        global_every=0,
        # A bias would be added where no relatives are seen.
        attention_bias=False,
        qk_norm=True,
        qk_norm_width=QueryKeyWidth.head,
        qkv_clip=None,
        output_gate=False,
    )
    return SelfAttention(config, SlidingWindow.of_relatives(config.relatives_around), vocabulary)


def _query_key_norm(config: ModelConfig, mechanism: Attention) -> nn.Module:
    if not config.qk_norm:
        return nn.Identity()
    if config.qk_norm_width is QueryKeyWidth.layer:
        return WidthNorm(config)
    norm, num_exact = _NORMS[mechanism.qk_norm], mechanism.num_exact_heads
    if not num_exact or mechanism.qk_norm is QueryKeyNorms.free:
        return norm(num_heads=config.num_heads)
    return NormsByKind(
        num_exact_heads=num_exact, linear=norm(num_heads=config.num_heads - num_exact)
    )
