"""Linformer: attention to learned mixtures of positions (Wang et al., arXiv 2006.04768)."""

from enum import StrEnum
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.attention.base import Attention, SharesParameters
from protlm.attention.masking import zero_padding
from protlm.attention.precision import full_precision, wide
from protlm.errors import UserError, refuse_unknown


class Sharing(StrEnum):
    """Who uses one projection, each name with all that the one before it shares."""

    none = "none"
    heads = "heads"
    key_value = "key_value"
    layers = "layers"


@final
class Linformer(Attention, SharesParameters):
    """Keys and values projected along the sequence to P learned mixtures of positions.

    O = softmax(q (E k)ᵀ / √K) F v with learned E and F, each P × max_length and sliced to the first
    L columns (section 4). Keys and values at padding are 0 before they are projected, and the
    projected ones are never masked: a short protein attends to P mixtures as a long one does.
    Columns belong to positions of the tensor, so nothing is learned about positions that no
    training sequence had, and there is no causal form, as the projection mixes all positions. A
    row's weights on values, softmax(..) F, may be negative and need not sum to 1. All is computed
    in float32 or better: with less, gradients are off by more than 1 %.

    The entries of E and F start from N(0, 1/P), as in Theorem 2, whose factors δ and e^(-δ) are
    left to learning.

    Args:
        num_heads: heads H, where each has projections of its own.
        max_length: columns of E and F, the longest input.
        projected_length: mixtures P; k in the paper.
        sharing: `none`: E and F for every head. `heads`: one E and one F for all heads of a layer.
            `key_value`: as well E = F. `layers`: as well one E for all layers.

    Raises:
        UserError: fewer mixtures than 1, or an unknown way to share.
    """

    supports_bidirectional = True
    supports_causal = False
    matrices = ("key_projection", "value_projection")
    cost: ClassVar[str] = "L P K"
    advice: ClassVar[str] = "proteins of like length, when no map over residues is needed"
    map_meaning: ClassVar[str] = "the weight of value j in output i; rows do not sum to 1"

    def __init__(
        self,
        *,
        num_heads: int,
        max_length: int,
        projected_length: int = 256,
        sharing: str = "layers",
    ) -> None:
        super().__init__()
        refuse_unknown("attention.sharing", sharing, Sharing)
        if projected_length < 1:
            raise UserError(
                f"attention.projected_length={projected_length} must be at least 1; type "
                "attention.projected_length=256"
            )
        self.max_length = max_length
        self.sharing = Sharing(sharing)
        shape = (num_heads if sharing == Sharing.none else 1, projected_length, max_length)
        has_own_values = sharing in (Sharing.none, Sharing.heads)
        self.key_projection = _drawn(*shape)
        self.value_projection = _drawn(*shape) if has_own_values else None
        # Within a tuple, the layer that owns the parameters is no submodule: they are listed,
        # saved and optimised once.
        self._owner: tuple[Linformer] | None = None

    def share_with(self, first: Attention) -> None:
        """See `SharesParameters.share_with`."""
        assert isinstance(first, Linformer)
        if self.sharing is Sharing.layers:
            self.key_projection = None
            self._owner = (first,)

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
        """See `Attention.forward`.

        Raises:
            UserError: more than `max_length` positions.
        """
        self._refuse_longer(mask_BL.shape[1])
        keys, values = self._projections()
        with full_precision(v_BHLC):
            # Queries too: NaN in a row that is 0 in the end would be NaN in the gradients.
            q, k, v = (wide(zero_padding(x, mask_BL)) for x in (q_BHLK, k_BHLK, v_BHLC))
            out_BHLC = F.scaled_dot_product_attention(q, _projected(k, keys), _projected(v, values))
        return zero_padding(out_BHLC.to(v_BHLC.dtype), mask_BL)

    def _projections(self) -> tuple[Tensor, Tensor]:
        """E and F, (H or 1, P, max_length)."""
        owner = self if self._owner is None else self._owner[0]
        keys, values = owner.key_projection, owner.value_projection
        assert keys is not None
        return keys, keys if values is None else values


def _drawn(number: int, projected_length: int, max_length: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(number, projected_length, max_length) / projected_length**0.5)


def _projected(x_BHLK: Tensor, projection: Tensor) -> Tensor:
    rows = projection[..., : x_BHLK.shape[2]].to(x_BHLK.dtype)
    # einsum repeats a matrix neither for the samples nor for the heads that share it.
    return torch.einsum("hpl,bhlk->bhpk", rows, x_BHLK)
