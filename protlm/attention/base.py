"""The interface of an attention mechanism, which mixes value vectors across positions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from protlm.attention.ops.numerics import accum_dtype, not_compiled
from protlm.bounds import Bounds, taken
from protlm.config.fields import Range
from protlm.system.errors import UserError


def even(low: int) -> Range:
    """Returns the even numbers from `low` on, for an option `Annotated[int, even(2)]`."""
    return Range(f"even and at least {low}", lambda x: x >= low and x % 2 == 0)


def odd(low: int) -> Range:
    """Returns the odd numbers from `low` on."""
    return Range(f"odd and at least {low}", lambda x: x >= low and x % 2 == 1)


class QueryKeyNorms(StrEnum):
    """The normalization of queries and keys."""

    # Norms of at most √3 after scaling by K^(-1/4), so that softmax estimates have small variance.
    bounded = "bounded"
    # Root mean square 1, times an unbounded learned gain per head.
    free = "free"
    # No normalization: there are no products of queries and keys, or the mechanism normalizes them.
    none = "none"


class Context(NamedTuple):
    """What a mechanism is given beside queries, keys and values.

    Attributes:
        hidden_BLD: the normalized input of the block, for gates and projections.
        mask_BL: true at residues and special tokens, false at padding. Inputs at padding, even
            NaN, do not affect outputs at other positions. Outputs at padding are 0, and so is a
            row without visible keys.
        causal: whether position i sees only positions up to and including i.
        is_whole: whether the host knows that the mask is true everywhere.
        logit_bias: returns the biases of logits, HML, of some queries and all keys, from the number
            L of these; only for a mechanism that `takes_bias`.
    """

    hidden_BLD: Tensor
    mask_BL: Tensor
    causal: bool
    is_whole: bool = False
    logit_bias: Callable[[int, slice], Tensor] | None = None

    def of_positions(self, start: int) -> "Context":
        """Returns the context of the positions from one on."""
        return self._replace(hidden_BLD=self.hidden_BLD[:, start:], mask_BL=self.mask_BL[:, start:])


class Attention(nn.Module, ABC):
    """An attention mechanism, which mixes value vectors across positions, per head.

    A mechanism is one module `protlm/attention/NAME.py` that defines one subclass, and one file
    `conf/attention/NAME.yaml` with its name and the constructor's keyword arguments, which it
    explains. The constructor may also have the parameters `num_heads`, `head_dim`, `model_dim`,
    `max_length` and `seed`, which the model provides. The first line of the class docstring
    summarizes the idea; it is listed in `docs/mechanisms.md` with the class attributes.
    """

    # The modes that a mechanism supports; an instance overrides them where settings exclude one.
    supports_bidirectional: bool = True
    supports_causal: bool = True
    # Whether the mechanism can be exported with a free length: nothing in `mix` depends on it under
    # `torch.compiler.is_exporting()`. An instance may override it.
    exports: bool = False
    # Whether keys are the queries; the model then has no key projection.
    shares_query_key: ClassVar[bool] = False
    # The effect of `model.qk_norm=true` on queries and keys; an instance may override it.
    qk_norm: QueryKeyNorms = QueryKeyNorms.free
    # How many of the first heads have softmax weights, and so free norms, whatever `qk_norm` is.
    num_exact_heads: int = 0
    # Whether the model applies rotary positions to queries and keys.
    takes_rotary: ClassVar[bool] = True
    # Whether the model can add biases to logits of queries and keys.
    takes_bias: ClassVar[bool] = False
    # Whether no softmax over pairs of positions is computed, so that `hybrid` may have it in the
    # heads without windows, if it also decodes step by step.
    is_linear: ClassVar[bool] = True
    # Whether products of queries and keys are rounded under autocast, as torch's own attention is.
    rounded_by_autocast: ClassVar[bool] = False
    # Names of parameters that multiply activations like the weight of a linear layer. Of the
    # parameters outside linear layers, only these have weight decay.
    matrices: ClassVar[tuple[str, ...]] = ()
    # Options that may be lists with one value for each layer (`layers.py`).
    per_layer_options: ClassVar[tuple[str, ...]] = ()
    # Options that decide how outputs are computed, and not what they are. They may change when a
    # run continues, and a saved model does not have them.
    runtime_options: ClassVar[tuple[str, ...]] = ()
    # The time complexity of one head, in the letters of `protlm.shapes` and the options.
    cost: ClassVar[str]
    # When to use it for proteins.
    advice: ClassVar[str]
    # The meaning of entry (i, j) of a map.
    map_meaning: ClassVar[str] = "the weight of value j in output i"
    # The longest input, in positions; None for no limit.
    max_length: int | None = None

    @classmethod
    def stored_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options without `runtime_options`, as a saved model has them."""
        return {name: value for name, value in options.items() if name not in cls.runtime_options}

    @abstractmethod
    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        """Returns the mixed values, BHLC, in the dtype of `v_BHLC`.

        Queries and keys have rotary positions already (but see `takes_rotary`), and are not yet
        scaled.
        """

    # Lengths and numbers of proteins differ between batches.
    @not_compiled
    def forward_packed(self, heads: Sequence[Tensor], context: Context, bounds: Bounds) -> Tensor:
        """Returns the mixed values of packed proteins, of which none sees another, BHLC.

        The heads are queries, keys and values. All tensors have one sample, the joined rows. The
        default calls `mix` for padded rows of proteins of similar length.
        """
        places, parts = [], []
        for place_BM, mask_BM in bounds.padded_rows():
            given = *heads, context.hidden_BLD[:, None]
            q, k, v, hidden_B1MD = (taken(x, place_BM) for x in given)
            padded = context._replace(hidden_BLD=hidden_B1MD[:, 0], mask_BL=mask_BM, is_whole=False)
            out_BHMC = self.mix(q, k, v, padded)
            places.append(place_BM[mask_BM])
            parts.append(out_BHMC.transpose(0, 1)[:, mask_BM])
        out_HLC = torch.zeros_like(heads[2][0])
        return out_HLC.index_copy(1, torch.cat(places), torch.cat(parts, dim=1))[None]

    def map_rows(self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, rows: slice) -> Tensor:
        """Returns some rows of the map, BHML, in float32 (float64 for float64 queries).

        The default is exact for every mechanism that is linear in its values, and needs memory
        in proportion to the number of rows. It runs `mix` with one value channel per row, and
        takes the gradient of channel c of output row c: that gradient in channel c of the values is
        the row (the transpose of the map on identity values, arXiv 2009.14794, C.4).
        """
        return self._rows_by_gradient(self.mix, q_BHLK, k_BHLK, context, rows)

    @staticmethod
    def _rows_by_gradient(
        mix: Callable[[Tensor, Tensor, Tensor, Context], Tensor],
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        context: Context,
        rows: slice,
    ) -> Tensor:
        batch, heads, length, _ = q_BHLK.shape
        dtype = accum_dtype(q_BHLK)
        # Tensors made in inference mode have to be copied before they can have gradients.
        with torch.inference_mode(False), torch.enable_grad():
            q_BHLK, k_BHLK = (x.detach().clone().to(dtype) for x in (q_BHLK, k_BHLK))
            hidden_BLD, mask_BL = context.hidden_BLD.detach().clone(), context.mask_BL.clone()
            positions = torch.arange(length, device=q_BHLK.device)[rows]
            v_BHLM = q_BHLK.new_zeros(batch, heads, length, len(positions)).requires_grad_()
            context = context._replace(hidden_BLD=hidden_BLD, mask_BL=mask_BL)
            out_BHLM = mix(q_BHLK, k_BHLK, v_BHLM, context)
            pick_BHLM = torch.zeros_like(out_BHLM)
            pick_BHLM[:, :, positions, torch.arange(len(positions), device=q_BHLK.device)] = 1
            (map_BHLM,) = torch.autograd.grad(out_BHLM, v_BHLM, pick_BHLM)
        return map_BHLM.mT

    def forward(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        context: Context,
        bounds: Bounds | None = None,
    ) -> Tensor:
        """Returns the mixed values; with bounds, those of packed proteins."""
        self._refuse_longer(context.mask_BL.shape[1] if bounds is None else bounds.longest)
        if bounds is not None:
            return self.forward_packed((q_BHLK, k_BHLK, v_BHLC), context, bounds)
        return self.mix(q_BHLK, k_BHLK, v_BHLC, context)

    def attention_map(
        self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, rows: slice | None = None
    ) -> Tensor:
        """Returns the map, BHLL, or a block of its rows, BHML, where L×L would not fit in memory.

        See `map_meaning` for its entries.
        """
        self._refuse_longer(context.mask_BL.shape[1])
        return self.map_rows(q_BHLK, k_BHLK, context, slice(None) if rows is None else rows)

    def _refuse_longer(self, length: int) -> None:
        if self.max_length is not None and length > self.max_length:
            raise UserError(
                f"{length} positions exceed the {self.max_length} that this attention has tables "
                "for; use shorter sequences, or a model with a larger model.max_length"
            )


class RandomFeatures(ABC):
    """A mechanism with random projections, which are redrawn outside `forward`.

    `redraw_every` counts optimizer steps; None keeps the first draw.
    """

    redraw_every: int | None

    @abstractmethod
    def redraw(self, index: int) -> None:
        """Draws projection number `index` in place, a pure function of (seed, index)."""


class SharesParameters(ABC):
    """A mechanism whose layers may share parameters."""

    @abstractmethod
    def share_with(self, first: Attention) -> None:
        """Uses the parameters of the first layer in this one, if the options say so.

        The first layer has the same class and options.
        """


class State(Protocol):
    """The recurrent state of a mechanism: a tensor, or a dataclass of tensors."""

    @abstractmethod
    def __getitem__(self, rows_B: Tensor, /) -> Self:
        """Copies the state of some samples, given by their indices (int64), which may repeat."""


@dataclass(frozen=True)
class StateParts:
    """A state that consists of others: the base of dataclasses."""

    def __getitem__(self, rows_B: Tensor, /) -> Self:
        parts = {name: part for name, part in vars(self).items() if part is not None}
        return replace(self, **{name: part[rows_B] for name, part in parts.items()})


StateT = TypeVar("StateT", bound=State)


class Recurrent(ABC, Generic[StateT]):
    """A causal mechanism that can process one position after another.

    Stepping through a sequence returns the outputs of `forward` with `causal=True` on the whole
    sequence. The state of a linear mechanism has a constant size. The first axis of the tensors of
    a state counts samples, so that finished sequences can leave a batch: `state[rows_B]`.
    """

    @abstractmethod
    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> StateT:
        """Returns the state before the first position; keys and values give sizes and dtypes."""

    @abstractmethod
    def step(
        self, state: StateT, q_BHK: Tensor, k_BHK: Tensor, v_BHC: Tensor, context: Context
    ) -> tuple[StateT, Tensor]:
        """Processes the next position of every sample; the context is that of this position.

        Returns:
            The state after the position, and the mixed values, BHC, in the dtype of `v_BHC`. The
            given state must not be used again: it may have been modified in place.
        """
