"""Longformer: sliding windows, dilated in some heads, and global tokens (arXiv 2004.05150)."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor, nn

from protlm.attention.base import Attention, Context, Recurrent, StateParts, even
from protlm.attention.ops.blocks import SharedKeys, Window, window_softmax
from protlm.attention.ops.global_tokens import GlobalTokens, check_residue_numbers, global_mask
from protlm.attention.ops.key_value_cache import KeyValueCache
from protlm.attention.ops.numerics import (
    no_autocast,
    softmax_weights,
    upcast,
    visible_keys,
    visible_softmax,
    zero_padding,
)
from protlm.config.fields import at_least
from protlm.system.errors import OptionError


@final
@dataclass(frozen=True)
class LongformerState(StateParts):
    """The first P positions with their hidden inputs, and a ring of the last positions.

    Position P - 1 is the last global one, so that every global token finds all positions before it
    in the first P slots. Their hidden inputs are kept for the projections of global tokens.
    """

    cache: KeyValueCache
    hidden_BPD: Tensor


@final
class Longformer(Attention, Recurrent[LongformerState]):
    """Exact softmax in a sliding window, and a few global tokens that see and are seen by all.

        out_i = Σ_{j ∈ W(i) ∪ G} exp(q_i·k_j / √K) v_j / Σ_{j ∈ W(i) ∪ G} exp(q_i·k_j / √K)
        out_g = Σ_j exp(q'_g·k'_j / √K) v'_j / Σ_j exp(q'_g·k'_j / √K)                   g ∈ G

    (Beltagy et al., arXiv 2004.05150, section 3.) The window W(i) is i and the w/2 positions on
    either side of it (w = `window`) or, in causal mode, i and the w positions before it; positions
    are indices in the tensor. In dilated heads the positions of a window are d = `dilation` apart.
    The global tokens G are the first true positions of a sample (`<cls>` comes first) and the
    residues of `global_positions`. A key counts once, whether it is in G, in W(i) or in both. In
    causal mode all sums are over positions up to the row's own: a row sees the global tokens before
    it, and a global token sees everything before it.

    Rows of global tokens have their own projections: q' = q + x W_q, k' = k + x W_k and
    v' = v + x W_v, where x is the hidden input. The paper's q' = x W'_q starts as a copy of q =
    x W. W_q = W'_q - W, which starts at 0, is equivalent, and also works with rotary positions and
    query-key norms, which q and k already contain. Weight decay pulls towards the copy, not
    towards 0.

    The window, the dilation and the number of dilated heads may be lists with one value for each
    layer: the paper's character models enlarge windows and dilation from the bottom to the top.

    A mechanism receives positions, not residues, so a motif has to be translated into residue
    numbers first. For the active site GXSXG of the sequence `protein`:
    `[m.start() + 1 + i for m in re.finditer("G.S.G", protein) for i in range(5)]`. One list applies
    to all sequences, which suits the variants of one protein, or aligned ones.

    Decoding keeps the keys and values of one window (of window · dilation positions), and those of
    all positions up to the last global one.

    Deviation from the paper: window sizes are arbitrary, not multiples of a block.
    """

    matrices = ("query_global", "key_global", "value_global")
    per_layer_options: ClassVar[tuple[str, ...]] = ("window", "dilation", "dilated_heads")
    is_linear: ClassVar[bool] = False
    rounded_by_autocast: ClassVar[bool] = True
    cost: ClassVar[str] = "L (window K + num_global D)"
    advice: ClassVar[str] = "long proteins whose exact local weights matter"

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        window: Annotated[int, even(2)] = 512,
        dilation: Annotated[int, at_least(1)] = 1,
        dilated_heads: Annotated[int, at_least(0)] = 0,
        num_global: Annotated[int, at_least(0)] = 1,
        global_positions: list[int] | None = None,
    ) -> None:
        super().__init__()
        if dilated_heads > num_heads:
            raise OptionError(
                f"dilated_heads={dilated_heads} must be at most the {num_heads} heads "
                "(model.num_heads); the paper dilates 2"
            )
        if dilation > 1 and dilated_heads == 0:
            raise OptionError(
                lambda at: (
                    f"{at}dilation={dilation} with {at}dilated_heads=0 dilates nothing; set "
                    f"{at}dilated_heads=2, or {at}dilation=1 for no gaps"
                )
            )
        self.num_heads = num_heads
        self.model_dim = model_dim
        self.window = window
        self.dilation = dilation
        self.dilated_heads = dilated_heads
        self.num_global = num_global
        self.residues = check_residue_numbers(global_positions)
        if num_global > 0 or self.residues:
            width = num_heads * head_dim
            self.query_global = nn.Parameter(torch.zeros(model_dim, width))
            self.key_global = nn.Parameter(torch.zeros(model_dim, width))
            self.value_global = nn.Parameter(torch.zeros(model_dim, width))

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        hidden_BLD, mask_BL, causal = context[:3]
        given = [zero_padding(x, mask_BL) for x in (q_BHLK, k_BHLK, v_BHLC)]
        q_BHLK, k_BHLK, v_BHLC = given
        tokens = self._global_tokens(mask_BL)
        if tokens is None:
            return zero_padding(self._local_rows(given, mask_BL, None, causal=causal), mask_BL)
        shared = SharedKeys(tokens.take(k_BHLK), tokens.take(v_BHLC), tokens.seen(causal=causal))
        # Global keys are in `shared`, and not counted again in a window.
        local = self._local_rows(given, mask_BL & ~tokens.is_global_BL, shared, causal=causal)
        x_BLD = hidden_BLD.masked_fill(~mask_BL[..., None], 0)
        rows = tokens.take(q_BHLK), tokens.take(x_BLD[:, None]).squeeze(1)
        weights_BHPL = self._global_weights(
            *rows, k_BHLK, x_BLD, tokens.visible(mask_BL, causal=causal)
        )
        rows_BHPC = self._global_means(weights_BHPL, v_BHLC, x_BLD).to(local.dtype)
        return zero_padding(tokens.put(local, rows_BHPC), mask_BL)

    def map_rows(self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, rows: slice) -> Tensor:
        """In the rows of global tokens an entry is the weight of v'."""
        hidden_BLD, mask_BL, causal = context[:3]
        q_BHLK, k_BHLK = (zero_padding(x, mask_BL) for x in (q_BHLK, k_BHLK))
        position_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
        sees = self._sees(position_L - position_L[rows, None], causal=causal)
        visible_B1ML = visible_keys(mask_BL, rows, causal=causal)
        tokens = self._global_tokens(mask_BL)
        if tokens is None:
            return softmax_weights(q_BHLK[:, :, rows], k_BHLK, visible_B1ML & sees)
        visible_BHML = visible_B1ML & (sees | tokens.is_global_BL[:, None, None])
        local_BHML = softmax_weights(q_BHLK[:, :, rows], k_BHLK, visible_BHML)
        x_BLD = hidden_BLD.masked_fill(~mask_BL[..., None], 0)
        own = tokens.take(q_BHLK), tokens.take(x_BLD[:, None]).squeeze(1)
        weights_BHPL = self._global_weights(
            *own, k_BHLK, x_BLD, tokens.visible(mask_BL, causal=causal)
        )
        number_BL = (tokens.is_global_BL.cumsum(dim=1) - 1).clamp(min=0)
        global_BHML = weights_BHPL.take_along_dim(number_BL[:, None, rows, None], dim=2)
        return torch.where(tokens.is_global_BL[:, None, rows, None], global_BHML, local_BHML)

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> LongformerState:
        first = max([self.num_global, *(residue + 1 for residue in self.residues)])
        cache = KeyValueCache.empty(k_BHK, v_BHC, first + self.window * self.dilation + 1)
        return LongformerState(cache, k_BHK.new_zeros(len(k_BHK), first, self.model_dim))

    @torch.no_grad()
    def step(
        self,
        state: LongformerState,
        q_BHK: Tensor,
        k_BHK: Tensor,
        v_BHC: Tensor,
        context: Context,
    ) -> tuple[LongformerState, Tensor]:
        cache, x_BPD = state.cache, state.hidden_BPD
        position, first = cache.length, x_BPD.shape[1]
        if position < first:
            x_BPD[:, position] = context.hidden_BLD[:, 0]
        cache = cache.append(k_BHK, v_BHC, slot=cache.ring_slot(first))
        state = LongformerState(cache, x_BPD)
        if position < self.num_global or position in self.residues:
            k, v = cache.k_BHMK[:, :, :first], cache.v_BHMC[:, :, :first]
            is_past_P = torch.arange(first, device=k.device) <= position
            weights_BH1P = self._global_weights(
                q_BHK[:, :, None], context.hidden_BLD, k, x_BPD, is_past_P.expand(len(k), 1, -1)
            )
            return state, self._global_means(weights_BH1P, v, x_BPD).squeeze(2).to(v_BHC.dtype)
        position_M = cache.ring_positions(first)
        visible_HM = self._sees(position_M - position, causal=True)
        residues = [*range(self.num_global), *self.residues]
        visible_HM[:, residues] = position_M[residues] >= 0
        visible_HM &= position_M >= 0
        return state, cache.attend(q_BHK, visible_HM)

    def _global_tokens(self, mask_BL: Tensor) -> GlobalTokens | None:
        """Returns the global tokens of every sample, or None where the settings choose none."""
        number = self.num_global + len(self.residues)
        if number == 0:
            return None
        return GlobalTokens.of(global_mask(mask_BL, self.num_global, self.residues), number)

    def _sees(self, offset: Tensor, *, causal: bool) -> Tensor:
        """Returns whether a head's query has keys at some offsets in its window: (H, ...)."""
        return torch.cat(
            [
                window.sees(offset).expand(heads.stop - heads.start, *offset.shape)
                for window, heads in self._windows(causal)
            ]
        )

    def _windows(self, causal: bool) -> list[tuple[Window, slice]]:
        """Returns the windows, each with its heads."""
        first = self.dilated_heads if self.dilation > 1 else 0
        both = (self.dilation, slice(0, first)), (1, slice(first, self.num_heads))
        return [
            (Window.of(self.window, causal=causal, dilation=dilation), heads)
            for dilation, heads in both
            if heads.start < heads.stop
        ]

    def _local_rows(
        self, given: list[Tensor], keys_BL: Tensor, shared: SharedKeys | None, *, causal: bool
    ) -> Tensor:
        """Computes all rows as if none were global, each with its window and the shared keys."""
        parts = [
            window_softmax(
                *(x[:, heads] for x in given),
                keys_BL=keys_BL,
                window=window,
                shared=None if shared is None else shared.of_heads(heads),
            )
            for window, heads in self._windows(causal)
        ]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _global_weights(
        self, q_BHPK: Tensor, own_BPD: Tensor, k_BHLK: Tensor, x_BLD: Tensor, visible_BPL: Tensor
    ) -> Tensor:
        """Computes softmax(q' k'ᵀ / √K) in the rows of global tokens, BHPL, in float32 or float64.

        q'·k' = q'·k + (W_k q')·x: this projects P queries instead of L keys.
        """
        with no_autocast(q_BHPK):
            q, k, own, x = upcast(q_BHPK), upcast(k_BHLK), upcast(own_BPD), upcast(x_BLD)
            q = q + torch.einsum("bpd,dhk->bhpk", own, self._of_heads(self.query_global, q))
            along = torch.einsum("bhpk,dhk->bhpd", q, self._of_heads(self.key_global, q))
            logits_BHPL = q @ k.mT + (along.flatten(1, 2) @ x.mT).unflatten(1, along.shape[1:3])
        return visible_softmax(logits_BHPL / math.sqrt(q_BHPK.shape[-1]), visible_BPL[:, None])

    def _global_means(self, weights_BHPL: Tensor, v_BHLC: Tensor, x_BLD: Tensor) -> Tensor:
        """Computes the means of v' = v + x W_v, BHPC, by projecting the means of x, not every x."""
        with no_autocast(v_BHLC):
            v, x = upcast(v_BHLC), upcast(x_BLD)
            mean = (weights_BHPL.flatten(1, 2) @ x).unflatten(1, weights_BHPL.shape[1:3])
            weights = self._of_heads(self.value_global, v)
            return weights_BHPL @ v + torch.einsum("bhpd,dhc->bhpc", mean, weights)

    def _of_heads(self, weights: Tensor, like: Tensor) -> Tensor:
        return weights.to(like.dtype).unflatten(1, (self.num_heads, -1))
