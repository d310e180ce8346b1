"""The common part of the attention-free transformers: gate, masks and map."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from protlm.attention.aft.sums import floor_of
from protlm.attention.base import Attention, Context, QueryKeyNorms
from protlm.attention.ops.numerics import no_autocast, upcast, visible_keys, zero_padding
from protlm.attention.ops.tiles import at_once

# (heads, exponents, values) -> means without the gate; the tensors are (B, H, L, channels).
Mixer = Callable[[slice, Tensor, Tensor], Tensor]

# Elements of the values of heads that are computed together; on a CPU they fit into its cache.
_CPU_NUMBERS, _GPU_NUMBERS = 1 << 18, 1 << 28


class AttentionFree(Attention):
    """Base of mechanisms Y_i = σ(q_i) ⊙ Σ_j e^(x_j + w_ij) v_j / Σ_j e^(x_j + w_ij), x = k.

    Rotary positions are not applied: they are meant for products of queries and keys, and there are
    none here. With rotated keys the weight e^x would depend on the absolute position, up to
    15-fold.
    """

    qk_norm = QueryKeyNorms.none
    takes_rotary: ClassVar[bool] = False
    is_map_times_values = False
    map_meaning: ClassVar[str] = (
        "the weight of value j in output i before the gate, mean over the head's channels"
    )

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        _, mask_BL, causal = context
        assert v_BHLC.shape[-1] == q_BHLK.shape[-1], "a query gates the channels of a value"
        with no_autocast(v_BHLC):
            return self._outputs(q_BHLK, k_BHLK, v_BHLC, mask_BL, causal=causal)

    @torch.no_grad()
    def map_rows(self, q_BHLK: Tensor, k_BHLK: Tensor, context: Context, rows: slice) -> Tensor:
        _, mask_BL, causal = context
        hidden_B1ML = ~visible_keys(mask_BL, rows, causal=causal)
        with no_autocast(k_BHLK):
            exponents = self._masked_exponents(k_BHLK, mask_BL)
            bias = self._bias(rows, k_BHLK.shape[2], causal=causal)
            # One channel at a time, since a channel has as many weights as a map.
            map_BHML = exponents.new_zeros(*k_BHLK.shape[:2], *hidden_B1ML.shape[2:])
            for exponents_BHL in exponents.unbind(dim=-1):
                logits = exponents_BHL[:, :, None] + bias
                weights_BHML = logits.masked_fill(hidden_B1ML, floor_of(k_BHLK)).softmax(dim=-1)
                map_BHML += weights_BHML / exponents.shape[-1]
        return map_BHML.masked_fill(hidden_B1ML, 0)

    def _outputs(
        self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor, *, causal: bool
    ) -> Tensor:
        """Computes all heads, some at a time."""
        means_of = self._mixer(q_BHLK.shape[2], causal=causal)
        numbers = v_BHLC[:, 0].numel()
        size = at_once(v_BHLC, numbers, cpu=_CPU_NUMBERS, gpu=_GPU_NUMBERS)
        # The gradient of a split is one tensor; every slice would have one for all heads.
        groups = zip(*(x.split(size, dim=1) for x in (q_BHLK, k_BHLK, v_BHLC)), strict=True)
        outs = [
            # Intermediate results are recomputed in the backward pass, not stored.
            checkpoint(
                self._gated_means,
                *group,
                mask_BL,
                partial(means_of, slice(index * size, (index + 1) * size)),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for index, group in enumerate(groups)
        ]
        return torch.cat(outs, dim=1)

    def _gated_means(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        mask_BL: Tensor,
        means_of: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        exponents = self._masked_exponents(k_BHLK, mask_BL)
        means_BHLC = means_of(exponents, upcast(zero_padding(v_BHLC, mask_BL)))
        gate_BHLK = upcast(zero_padding(q_BHLK, mask_BL)).sigmoid()
        return zero_padding(gate_BHLK * means_BHLC, mask_BL).to(v_BHLC.dtype)

    def _masked_exponents(self, k_BHLK: Tensor, mask_BL: Tensor) -> Tensor:
        exponents = self._exponents(upcast(zero_padding(k_BHLK, mask_BL)))
        return exponents.masked_fill(~mask_BL[:, None, :, None], floor_of(k_BHLK))

    def _exponents(self, keys: Tensor) -> Tensor:
        """Returns x for keys (..., K): of every channel, or (..., 1) if one for all channels."""
        return keys

    @abstractmethod
    def _mixer(self, length: int, *, causal: bool) -> Mixer:
        """Returns the function from exponents and values of some heads to means, for one length.

        Exponents at padding are very low, values there are 0.
        """

    @abstractmethod
    def _bias(self, rows: slice, length: int, *, causal: bool) -> Tensor:
        """Returns w of some rows, broadcastable to HML; any value where a row cannot see a key."""
