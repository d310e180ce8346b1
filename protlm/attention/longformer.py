"""Longformer: sliding windows, dilated in some heads, and global tokens (arXiv 2004.05150)."""

import math
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from protlm.attention.base import Attention
from protlm.attention.masking import visible_keys, zero_padding
from protlm.attention.precision import full_precision, wide
from protlm.attention.windows import (
    SharedKeys,
    Window,
    check_window,
    softmax_weights,
    visible_softmax,
    window_softmax,
)
from protlm.errors import UserError


@dataclass(frozen=True)
class GlobalTokens:
    """The first true positions of every sample, P of them, and where they are.

    A sample with fewer has other positions, at padding, in their place: `exists_BP` is false.
    """

    position_BP: Tensor
    exists_BP: Tensor
    is_global_BL: Tensor

    @classmethod
    def first(cls, number: int, mask_BL: Tensor) -> "GlobalTokens":
        """The first `number` true positions."""
        is_global_BL = mask_BL & (mask_BL.cumsum(dim=1) <= number)
        position_BP = (~is_global_BL).byte().argsort(dim=1, stable=True)[:, :number]
        return cls(position_BP, is_global_BL.gather(1, position_BP), is_global_BL)

    def take(self, x_BHLK: Tensor) -> Tensor:
        """What a tensor holds at the global tokens, BHPK."""
        return x_BHLK.take_along_dim(self.position_BP[:, None, :, None], dim=2)

    def put(self, x_BHLK: Tensor, rows_BHPK: Tensor) -> Tensor:
        """A tensor with other rows at the global tokens, BHLK."""
        index = self.position_BP[:, None, :, None].expand_as(rows_BHPK)
        return x_BHLK.scatter(2, index, rows_BHPK)


@final
class Longformer(Attention):
    """Exact softmax in a sliding window, and a few global tokens that see and are seen by all.

        out_i = Σ_{j ∈ W(i) ∪ G} exp(q_i·k_j / √K) v_j / Σ_{j ∈ W(i) ∪ G} exp(q_i·k_j / √K)
        out_g = Σ_j exp(q'_g·k'_j / √K) v'_j / Σ_j exp(q'_g·k'_j / √K)                   g ∈ G

    (Beltagy et al., arXiv 2004.05150, section 3.) The window W(i) is i and the w/2 positions on
    either side of it, or, causal, i and the w positions before it; positions are indices in the
    tensor. In dilated heads its positions are d apart. The global tokens G are the first true
    positions of a sample, `<cls>` first; a key is counted once, whether it is in G, W(i) or both.
    Causal, a global token too sees only itself and what is before it, all of which is global.

    Rows of global tokens have projections of their own: q' = q + x W_q, k' = k + x W_k and
    v' = v + x W_v, x the hidden input. The paper's q' = x W'_q starts as a copy of q = x W; W_q =
    W'_q - W, which starts as 0, is the same, and works with rotary positions and query-key norms
    too, which are in q and k already. Weight decay pulls towards the copy, not towards 0.

    Deviations from the paper: windows and dilation are the same in all layers (its character
    models enlarge both from layer to layer), and their sizes are any, not multiples of a block.

    Args:
        num_heads: heads H.
        head_dim: width K of queries, keys and values.
        model_dim: width D of the hidden input.
        window: positions w that a query sees beside its own; even.
        dilation: positions from one key to the next in dilated heads.
        dilated_heads: how many heads are dilated, the first ones; the paper dilates 2.
        num_global: how many true positions at the start are global; 0 for none.

    Raises:
        UserError: an odd window, a number out of range, or a dilation without heads for it.
    """

    supports_bidirectional = True
    supports_causal = True
    matrices = ("query_global", "key_global", "value_global")
    cost: ClassVar[str] = "L (window K + num_global D)"
    advice: ClassVar[str] = "long proteins whose exact local weights matter"

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        window: int = 512,
        dilation: int = 1,
        dilated_heads: int = 0,
        num_global: int = 1,
    ) -> None:
        super().__init__()
        check_window(window)
        _check_dilation(dilation, dilated_heads, num_heads)
        if num_global < 0:
            raise UserError(
                f"attention.num_global={num_global} must be 0 or more; try attention.num_global=1"
            )
        self.num_heads = num_heads
        self.window = window
        self.dilation = dilation
        self.dilated_heads = dilated_heads
        self.num_global = num_global
        if num_global > 0:
            width = num_heads * head_dim
            self.query_global = nn.Parameter(torch.zeros(model_dim, width))
            self.key_global = nn.Parameter(torch.zeros(model_dim, width))
            self.value_global = nn.Parameter(torch.zeros(model_dim, width))

    def forward(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        *,
        hidden_BLD: Tensor,
        mask_BL: Tensor,
        causal: bool,
    ) -> Tensor:
        """See `Attention.forward`; with global tokens C = K."""
        q_BHLK, k_BHLK, v_BHLC = (zero_padding(x, mask_BL) for x in (q_BHLK, k_BHLK, v_BHLC))
        if self.num_global == 0:
            local = self._local_rows(q_BHLK, k_BHLK, v_BHLC, mask_BL, None, causal=causal)
            return zero_padding(local, mask_BL)
        tokens = GlobalTokens.first(self.num_global, mask_BL)
        shared = SharedKeys(tokens.take(k_BHLK), tokens.take(v_BHLC), tokens.exists_BP)
        # Every query sees the global keys: those in its window are not counted again. Causal too,
        # because rows before the last global token are global themselves.
        keys_BL = mask_BL & ~tokens.is_global_BL
        local = self._local_rows(q_BHLK, k_BHLK, v_BHLC, keys_BL, shared, causal=causal)
        x_BLD = hidden_BLD.masked_fill(~mask_BL[..., None], 0)
        weights_BHPL = self._global_weights(q_BHLK, k_BHLK, x_BLD, mask_BL, tokens, causal=causal)
        rows_BHPC = self._global_mean(weights_BHPL, v_BHLC, x_BLD).to(local.dtype)
        return zero_padding(tokens.put(local, rows_BHPC), mask_BL)

    def attention_map(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        *,
        hidden_BLD: Tensor,
        mask_BL: Tensor,
        causal: bool,
        rows: slice | None = None,
    ) -> Tensor:
        """The map or a block of its rows, in float32 (float64 for float64 queries).

        In the rows of global tokens an entry is the weight of v'.
        """
        rows = slice(None) if rows is None else rows
        q_BHLK, k_BHLK = (zero_padding(x, mask_BL) for x in (q_BHLK, k_BHLK))
        position_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
        offset = position_L - position_L[rows, None]
        sees = torch.stack([window.sees(offset) for window in self._windows_of_heads(causal)])
        visible_B1ML = visible_keys(mask_BL, rows, causal=causal)
        if self.num_global == 0:
            return softmax_weights(q_BHLK[:, :, rows], k_BHLK, visible_B1ML & sees)
        tokens = GlobalTokens.first(self.num_global, mask_BL)
        visible_BHML = visible_B1ML & (sees | tokens.is_global_BL[:, None, None])
        local_BHML = softmax_weights(q_BHLK[:, :, rows], k_BHLK, visible_BHML)
        x_BLD = hidden_BLD.masked_fill(~mask_BL[..., None], 0)
        weights_BHPL = self._global_weights(q_BHLK, k_BHLK, x_BLD, mask_BL, tokens, causal=causal)
        number_BL = (mask_BL.cumsum(dim=1) - 1).clamp(0, weights_BHPL.shape[2] - 1)
        global_BHML = weights_BHPL.take_along_dim(number_BL[:, None, rows, None], dim=2)
        return torch.where(tokens.is_global_BL[:, None, rows, None], global_BHML, local_BHML)

    def _windows_of_heads(self, causal: bool) -> list[Window]:
        dilated = Window.of(self.window, causal=causal, dilation=self.dilation)
        plain = Window.of(self.window, causal=causal)
        return [dilated if head < self.dilated_heads else plain for head in range(self.num_heads)]

    def _local_rows(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        keys_BL: Tensor,
        shared: SharedKeys | None,
        *,
        causal: bool,
    ) -> Tensor:
        """All rows, as if no token were global, beside the keys that all of them see."""
        parts, start = [], 0
        for window, group in groupby(self._windows_of_heads(causal)):
            heads = slice(start, start + len(list(group)))
            part = window_softmax(
                q_BHLK[:, heads],
                k_BHLK[:, heads],
                v_BHLC[:, heads],
                keys_BL=keys_BL,
                window=window,
                shared=None if shared is None else shared.of_heads(heads),
            )
            parts.append(part)
            start = heads.stop
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _global_weights(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        x_BLD: Tensor,
        mask_BL: Tensor,
        tokens: GlobalTokens,
        *,
        causal: bool,
    ) -> Tensor:
        """softmax(q' k'ᵀ / √K) in the rows of the global tokens, BHPL, in float32 or float64.

        q'·k' = q'·k + (W_k q')·x: this projects P queries instead of L keys.
        """
        with full_precision(q_BHLK):
            q, k, x = wide(tokens.take(q_BHLK)), wide(k_BHLK), wide(x_BLD)
            own = tokens.take(x[:, None]).squeeze(1)
            q = q + torch.einsum("bpd,dhk->bhpk", own, self._of_heads(self.query_global, q))
            along = torch.einsum("bhpk,dhk->bhpd", q, self._of_heads(self.key_global, q))
            logits_BHPL = q @ k.mT + (along.flatten(1, 2) @ x.mT).unflatten(1, along.shape[1:3])
        visible_BPL = mask_BL[:, None] & tokens.exists_BP[..., None]
        if causal:
            position_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
            visible_BPL = visible_BPL & (position_L <= tokens.position_BP[..., None])
        return visible_softmax(logits_BHPL / math.sqrt(q_BHLK.shape[-1]), visible_BPL[:, None])

    def _global_mean(self, weights_BHPL: Tensor, v_BHLC: Tensor, x_BLD: Tensor) -> Tensor:
        """The mean of v' = v + x W_v, BHPC: that of x is projected, instead of every x."""
        with full_precision(v_BHLC):
            v, x = wide(v_BHLC), wide(x_BLD)
            mean = (weights_BHPL.flatten(1, 2) @ x).unflatten(1, weights_BHPL.shape[1:3])
            weights = self._of_heads(self.value_global, v)
            return weights_BHPL @ v + torch.einsum("bhpd,dhc->bhpc", mean, weights)

    def _of_heads(self, weights: Tensor, like: Tensor) -> Tensor:
        """A projection, a head at a time: (D, H, K)."""
        return weights.to(like.dtype).unflatten(1, (self.num_heads, -1))


def _check_dilation(dilation: int, dilated_heads: int, num_heads: int) -> None:
    if dilation < 1:
        raise UserError(
            f"attention.dilation={dilation} must be at least 1, which leaves no gaps; "
            "try attention.dilation=2 attention.dilated_heads=2"
        )
    if not 0 <= dilated_heads <= num_heads:
        raise UserError(
            f"attention.dilated_heads={dilated_heads} must be between 0 and the {num_heads} heads "
            "(model.num_heads); the paper dilates 2"
        )
    if (dilation > 1) != (dilated_heads > 0):
        raise UserError(
            f"attention.dilation={dilation} with attention.dilated_heads={dilated_heads} dilates "
            "nothing; set attention.dilation=2 attention.dilated_heads=2, or 1 and 0 for no gaps"
        )
