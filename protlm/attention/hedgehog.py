"""Linear attention with learned exponential features, Hedgehog (Zhang et al., arXiv 2402.04347)."""

from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from protlm.attention.base import Context, Recurrent
from protlm.attention.linearized.base import Performer
from protlm.attention.linearized.positive import ExponentialPairs
from protlm.attention.ops.numerics import accum_dtype, no_autocast, zero_padding
from protlm.attention.relatives import SeesRelatives, View


@final
class Hedgehog(SeesRelatives, Recurrent[Tensor]):
    """Attention with weights φ(q)·φ'(k), φ(x) = [exp(Wx), exp(-Wx)], with learned W for each head.

    Queries and keys have different matrices W, K×K, which start as the identity (section 4.1). x is
    not scaled by K^(-1/4): W learns its scale. The features are trained to imitate the softmax
    attention of a trained model (`objective=distillation`), or with the model. Nothing is random.
    Outputs and gradients do not overflow for large queries and keys: linear attention subtracts a
    logit of each feature (docs/decisions/0019).
    """

    cost: ClassVar[str] = "L K²"
    advice: ClassVar[str] = "weights of a trained softmax model, if it is trained further"
    matrices: ClassVar[tuple[str, ...]] = ("query_map", "key_map")

    def __init__(self, *, num_heads: int, head_dim: int) -> None:
        super().__init__()
        identity_HKK = torch.eye(head_dim).repeat(num_heads, 1, 1)
        self.query_map = nn.Parameter(identity_HKK)
        self.key_map = nn.Parameter(identity_HKK.clone())
        self.linear = Performer(feature_map=ExponentialPairs, num_features=2 * head_dim)

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        q_BHLK, k_BHLK = self._mapped(q_BHLK, k_BHLK, context)
        return self.linear.mix(q_BHLK, k_BHLK, v_BHLC, context)

    def across(
        self, heads: Sequence[Tensor], context: Context, view: View, *, own: bool
    ) -> tuple[Tensor, Tensor | None]:
        q_BHLK, k_BHLK, v_BHLC = heads
        mapped = self._mapped(q_BHLK, k_BHLK, context)
        return self.linear.across((*mapped, v_BHLC), context, view, own=own)

    def _mapped(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        # The gradient of a matrix is a sum over all positions: padding must be 0, not NaN.
        q, k = (zero_padding(x, context.mask_BL) for x in (q, k))
        return _mapped(q, self.query_map), _mapped(k, self.key_map)

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> Tensor:
        return self.linear.initial_state(k_BHK, v_BHC)

    def step(
        self, state: Tensor, q_BHK: Tensor, k_BHK: Tensor, v_BHC: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        q_BH1K = _mapped(q_BHK[:, :, None], self.query_map)
        k_BH1K = _mapped(k_BHK[:, :, None], self.key_map)
        return self.linear.step(state, q_BH1K[:, :, 0], k_BH1K[:, :, 0], v_BHC, context)


def _mapped(x_BHLK: Tensor, map_HKK: Tensor) -> Tensor:
    """Returns W x of every head, in float32, or in float64 for float64."""
    dtype = accum_dtype(x_BHLK)
    with no_autocast(x_BHLK):
        return x_BHLK.to(dtype) @ map_HKK.to(dtype).mT
