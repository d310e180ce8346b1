"""The Performer with the ReLU kernel (Choromanski et al., arXiv 2009.14794, A.4 and D.3)."""

from functools import partial
from typing import Annotated, ClassVar, final

from protlm.attention.linearized.base import Performer
from protlm.attention.linearized.features import GeneralizedFeatures
from protlm.attention.linearized.gates import Decay
from protlm.attention.linearized.selection import Backend
from protlm.attention.ops.projection import Projection
from protlm.config.fields import at_least


@final
class PerformerRelu(Performer):
    """Attention with weights φ(q)·φ(k), φ_r(x) = relu(ω_r·x) + ε, normalized over the keys.

    As in the code released with the paper, x is scaled neither by K^(-1/4) nor by 1/√R: both would
    only change the size of ε relative to the features. Rows ω_r are orthogonal in blocks
    with chi(K) norms; without a projection, φ_r(x) = relu(x_r) + ε of the coordinates of the head.
    `performer_generalized` has other kernels and projections.
    """

    runtime_options: ClassVar[tuple[str, ...]] = ("backend",)
    advice: ClassVar[str] = "long proteins: the cheapest map over all pairs; the default"

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int = 1,
        model_dim: int = 1,
        num_features: Annotated[int | None, at_least(1)] = None,
        kernel_epsilon: Annotated[float, at_least(0)] = 1e-3,
        decay: Annotated[str, Decay] = "none",
        redraw_every: Annotated[int | None, at_least(1)] = None,
        backend: Annotated[str, Backend] = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(
            feature_map=partial(GeneralizedFeatures, kernel="relu", epsilon=kernel_epsilon),
            num_features=head_dim if num_features is None else num_features,
            projection=None if num_features is None else Projection(num_features, head_dim),
            redraw_every=redraw_every,
            seed=seed,
            backend=backend,
        )
        self._let_decay(decay, num_heads=num_heads, model_dim=model_dim)
