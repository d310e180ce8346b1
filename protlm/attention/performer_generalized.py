"""The Performer with a generalised kernel (Choromanski et al., arXiv 2009.14794, A.4 and D.3)."""

from functools import partial
from typing import ClassVar, final

from protlm.attention.performer.base import Performer
from protlm.attention.performer.generalized import (
    NONLINEARITIES,
    GeneralizedFeatures,
    check_generalized,
)
from protlm.attention.performer.normalization import normalizer_of
from protlm.attention.performer.projection import Projection
from protlm.errors import UserError

# Kernels f with f(-x) = f(x) or -f(x).
_SAME_FOR_BOTH_SIGNS = ("abs", "cos", "identity", "tanh")


@final
class PerformerGeneralized(Performer):
    """Attention with weights φ(q)·φ(k), φ_r(x) = f(ω_r·x) + ε, normalised over the keys.

    Without a projection φ_r(x) = f(x_r) + ε on the head's own coordinates, which is deterministic.

    Args:
        head_dim: width K of a query and a key.
        kernel: f, by name: `relu`, `elu` (elu + 1), `exp`, `abs`, `gelu`, `sigmoid`, `tanh`,
            `cos`, `square_relu` or `identity`.
        kernel_epsilon: ε, so that no row is without weight.
        num_features: rows R of the projection; None for no projection, R = K.
        antithetic: whether rows come in pairs ω, -ω.
        projection: `orthogonal` rows in blocks of K, `iid`, `hadamard` or `givens`.
        row_norms: `chi`, so that a row is N(0, I), or `sqrt_dim`, so that it lies on one sphere.
        normalizer: `denominator` divides by the sum of the weights; `rmsnorm` by the root mean
            square of the output.
        denominator_floor: the least sum of weights that is divided by; None for no floor.
        redraw_every: optimiser steps between two draws; None keeps the first for good.
        seed: what the projections are drawn from, together with the redraw index.

    Raises:
        UserError: an unknown name, a number that is out of range, a redraw without a projection,
            or a kernel that may be negative without a guard of its denominator.
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
                f"attention.antithetic=true does nothing with attention.kernel={kernel}: a feature "
                "of -ω is that of ω or its negative; set attention.antithetic=false"
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
                f"leave out attention.{name}"
            )
