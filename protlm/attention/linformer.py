"""Linformer: attention to learned mixtures of positions (Wang et al., arXiv 2006.04768)."""

from enum import StrEnum
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.attention.base import Attention, Context, SharesParameters
from protlm.attention.ops.numerics import no_autocast, upcast, zero_padding
from protlm.config.fields import at_least


class Sharing(StrEnum):
    """Which layers, heads and tensors use the same projection; each level includes the previous."""

    none = "none"
    heads = "heads"
    key_value = "key_value"
    layers = "layers"


@final
class Linformer(Attention, SharesParameters):
    """Keys and values projected along the sequence to P learned mixtures of positions.

    O = softmax(q (E k)ᵀ / √K) F v with learned E and F, each P × max_length with P =
    `projected_length`, and sliced to the first L columns (section 4). Keys and values at padding
    are set to 0 before they are projected, and the projected ones are never masked: a short protein
    attends to P mixtures as a long one does. Inputs longer than `max_length` are rejected. Columns
    belong to positions of the tensor, so nothing is learned about positions that no training
    sequence had. There is no causal form, because the projection mixes all positions. A row's
    weights on values, softmax(..) F, may be negative and need not sum to 1. All computations are in
    float32 or better: with less, gradients are off by more than 1 %.

    With rotary positions it is rotated keys that are mixed: the rotation comes before E. A mixture
    then has no position itself, and scores depend on absolute positions, not on distances alone.
    Learned positions (`model.positions=learned`) are more suitable.

    The entries of E and F are drawn from N(0, 1/P), as in Theorem 2, without its factors δ and
    e^(-δ), which training can learn.
    """

    supports_causal = False
    matrices = ("key_projection", "value_projection")
    cost: ClassVar[str] = "L P K"
    advice: ClassVar[str] = "proteins of similar length, if no map over residues is needed"
    map_meaning: ClassVar[str] = "the weight of value j in output i; rows do not sum to 1"

    def __init__(
        self,
        *,
        num_heads: int,
        max_length: int,
        projected_length: Annotated[int, at_least(1)] = 256,
        sharing: Annotated[str, Sharing] = "layers",
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.sharing = Sharing(sharing)
        shape = (num_heads if sharing == Sharing.none else 1, projected_length, max_length)
        self.key_projection = _drawn(*shape)
        self.value_projection = _drawn(*shape) if sharing in (Sharing.none, Sharing.heads) else None
        # In a tuple, the layer that owns the parameters is not a submodule, so that they are
        # listed, saved and optimized once.
        self._owner: tuple[Linformer] | None = None

    def share_with(self, first: Attention) -> None:
        assert isinstance(first, Linformer)
        if self.sharing is Sharing.layers:
            self.key_projection = None
            self._owner = (first,)

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        mask_BL = context.mask_BL
        owner = self if self._owner is None else self._owner[0]
        # E and F, (H or 1, P, max_length).
        keys, values = owner.key_projection, owner.value_projection
        assert keys is not None
        with no_autocast(v_BHLC):
            # Queries too: NaN in a padded row, although its output is 0, would reach gradients.
            q, k, v = (upcast(zero_padding(x, mask_BL)) for x in (q_BHLK, k_BHLK, v_BHLC))
            out_BHLC = F.scaled_dot_product_attention(
                q, _projected(k, keys), _projected(v, keys if values is None else values)
            )
        return zero_padding(out_BHLC.to(v_BHLC.dtype), mask_BL)


def _drawn(number: int, projected_length: int, max_length: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(number, projected_length, max_length) / projected_length**0.5)


def _projected(x_BHLK: Tensor, projection: Tensor) -> Tensor:
    rows = projection[..., : x_BHLK.shape[2]].to(x_BHLK.dtype)
    # Unlike matmul, einsum does not copy a matrix for the samples and heads that use it.
    return torch.einsum("hpl,bhlk->bhpk", rows, x_BHLK)
