"""Linear attention with elu + 1 features (Katharopoulos et al., arXiv 2006.16236)."""

from functools import partial
from typing import ClassVar, final

from protlm.attention.linearized.base import Performer
from protlm.attention.linearized.features import GeneralizedFeatures


@final
class LinearAttention(Performer):
    """Attention with weights φ(q)·φ(k), φ(x) = elu(x) + 1, normalized over the keys.

    O_i = φ(q_i) Σ_j φ(k_j)ᵀ v_j / φ(q_i) Σ_j φ(k_j)ᵀ (eqs. 5 and 7; causal: j ≤ i, eqs. 10 to
    12; recurrent: eqs. 18 to 20). Queries are not divided by √K, because the features do not
    estimate softmax. Nothing is random, and nothing is added to the denominator: for x < 0,
    elu(x) + 1 = exp(x) is computed as such, and is above 0 down to x = -87 in float32. A row with a
    sum of weights below 1e-30 is 0.
    """

    cost: ClassVar[str] = "L K²"
    advice: ClassVar[str] = "long proteins, without settings: the simplest linear mechanism"

    def __init__(self, *, head_dim: int) -> None:
        super().__init__(
            feature_map=partial(GeneralizedFeatures, kernel="elu", epsilon=0.0),
            num_features=head_dim,
        )
