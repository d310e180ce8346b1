"""Mean pooling as an attention mechanism: the line below which an estimate of softmax is of use."""

from typing import final

from torch import Tensor

from protlm.attention import Attention


@final
class UniformAttention(Attention):
    """Weighs every key alike, whatever the queries are."""

    supports_bidirectional = True
    supports_causal = False

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
        """Returns the mean of the values at the positions of `mask_BL`, for each of them."""
        assert not causal
        mask_B1L1 = mask_BL[:, None, :, None]
        sum_BH1C = v_BHLC.masked_fill(~mask_B1L1, 0).sum(dim=2, keepdim=True)
        return sum_BH1C / mask_B1L1.sum(dim=2, keepdim=True) * mask_B1L1
