"""The Performer with a generalized kernel (Choromanski et al., arXiv 2009.14794, A.4 and D.3)."""

from functools import partial
from typing import ClassVar, final

from protlm.attention.linearized.base import Performer
from protlm.attention.linearized.generalized import (
    NONLINEARITIES,
    GeneralizedFeatures,
    check_generalized,
)
from protlm.attention.linearized.normalization import normalizer_of
from protlm.attention.ops.projection import Projection
from protlm.system.errors import UserError

# Kernels f with f(-x) = f(x) or -f(x).
_SAME_FOR_BOTH_SIGNS = ("abs", "cos", "identity", "tanh")


@final
class PerformerGeneralized(Performer):
    """Attention with weights φ(q)·φ(k), φ_r(x) = f(ω_r·x) + ε, normalized over the keys.

    Without a projection φ_r(x) = f(x_r) + ε of the coordinates of the head, which is deterministic.

    Args:
        head_dim: width K of a query and a key.
        kernel: f, by name: `relu`, `elu` (elu + 1), `exp`, `abs`, `gelu`, `sigmoid`, `tanh`,
            `cos`, `square_relu` or `identity`.
        kernel_epsilon: ε, so that every row has weight.
        num_features: rows R of the projection; None for no projection, R = K.
        antithetic: whether rows come in pairs ω, -ω.
        projection: `orthogonal` rows in blocks of K, `iid`, `hadamard` or `givens`.
        row_norms: `chi`, so that a row is N(0, I), or `sqrt_dim`, so that it lies on one sphere.
        normalizer: `denominator` divides by the sum of the weights; `rmsnorm` by the root mean
            square of the output.
        denominator_floor: the smallest denominator; None for no floor.
        redraw_every: optimizer steps between redraws; None keeps the first draw.
        seed: the seed of the projections, together with the redraw index.
    """

    advice: ClassVar[str] = "trying the other kernels of the paper"

    def __init__(
        self,
        *,
        head_dim: int,
        kernel: str = "relu",
        kernel_epsilon: float = 1e-3,
        num_features: int | None = 256,
        antithetic: bool = False,
        projection: str = "orthogonal",
        row_norms: str = "chi",
        normalizer: str = "denominator",
        denominator_floor: float | None = None,
        redraw_every: int | None = None,
        seed: int = 0,
    ) -> None:
        check_generalized(kernel, kernel_epsilon)
        if antithetic and kernel in _SAME_FOR_BOTH_SIGNS:
            raise UserError(
                f"attention.antithetic=true has no effect with attention.kernel={kernel}: the "
                "feature of -ω is that of ω or its negative; set attention.antithetic=false"
            )
        super().__init__(
            feature_map=partial(GeneralizedFeatures, kernel=kernel, epsilon=kernel_epsilon),
            num_features=head_dim if num_features is None else num_features,
            projection=(
                _no_projection(projection, row_norms, antithetic)
                if num_features is None
                else Projection(num_features, head_dim, projection, row_norms, antithetic)
            ),
            normalizer=normalizer_of(
                normalizer,
                floor=denominator_floor,
                is_positive=NONLINEARITIES[kernel].is_positive,
            ),
            redraw_every=redraw_every,
            seed=seed,
        )


def _no_projection(projection: str, row_norms: str, antithetic: bool) -> None:
    settings = {"projection": projection, "row_norms": row_norms, "antithetic": antithetic}
    defaults = {"projection": "orthogonal", "row_norms": "chi", "antithetic": False}
    for name, value in settings.items():
        if value != defaults[name]:
            raise UserError(
                f"attention.{name}={value} needs a projection: set attention.num_features=256, or "
                f"omit attention.{name}"
            )
