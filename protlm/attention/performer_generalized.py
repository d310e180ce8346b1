"""The Performer with a generalized kernel (Choromanski et al., arXiv 2009.14794, A.4 and D.3)."""

from functools import partial
from typing import Annotated, ClassVar, final

from protlm.attention.linearized.base import Performer
from protlm.attention.linearized.features import NONLINEARITIES, GeneralizedFeatures
from protlm.attention.linearized.gates import Decay
from protlm.attention.linearized.normalization import denominator
from protlm.attention.ops.projection import Projection, RowNorms, RowSampling
from protlm.config.fields import above, at_least
from protlm.system.errors import OptionError

# Kernels f with f(-x) = f(x) or -f(x).
_SAME_FOR_BOTH_SIGNS = ("abs", "cos", "identity", "tanh")


@final
class PerformerGeneralized(Performer):
    """Attention with weights φ(q)·φ(k), φ_r(x) = f(ω_r·x) + ε, normalized over the keys.

    Without a projection φ_r(x) = f(x_r) + ε of the coordinates of the head, which is deterministic.
    """

    advice: ClassVar[str] = "trying the other kernels of the paper"

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int = 1,
        model_dim: int = 1,
        kernel: Annotated[str, NONLINEARITIES] = "relu",
        kernel_epsilon: Annotated[float, at_least(0)] = 1e-3,
        num_features: Annotated[int | None, at_least(1)] = 256,
        antithetic: bool = False,
        projection: Annotated[str, RowSampling] = "orthogonal",
        row_norms: Annotated[str, RowNorms] = "chi",
        denominator_floor: Annotated[float | None, above(0)] = None,
        decay: Annotated[str, Decay] = "none",
        redraw_every: Annotated[int | None, at_least(1)] = None,
        seed: int = 0,
    ) -> None:
        if antithetic and kernel in _SAME_FOR_BOTH_SIGNS:
            raise OptionError(
                lambda at: (
                    f"{at}antithetic=true has no effect with {at}kernel={kernel}: the feature of "
                    f"-ω is that of ω or its negative; set {at}antithetic=false"
                )
            )
        super().__init__(
            feature_map=partial(GeneralizedFeatures, kernel=kernel, epsilon=kernel_epsilon),
            num_features=head_dim if num_features is None else num_features,
            projection=(
                _no_projection(projection, row_norms, antithetic)
                if num_features is None
                else Projection(num_features, head_dim, projection, row_norms, antithetic)
            ),
            normalizer=denominator(
                denominator_floor, is_positive=NONLINEARITIES[kernel].is_positive
            ),
            redraw_every=redraw_every,
            seed=seed,
        )
        self._let_decay(decay, num_heads=num_heads, model_dim=model_dim)


def _no_projection(projection: str, row_norms: str, antithetic: bool) -> None:
    settings = {"projection": projection, "row_norms": row_norms, "antithetic": antithetic}
    defaults = {"projection": "orthogonal", "row_norms": "chi", "antithetic": False}
    changed = [name for name, value in settings.items() if value != defaults[name]]
    if changed:
        name = changed[0]
        raise OptionError(
            lambda at: (
                f"{at}{name}={settings[name]} needs a projection: set {at}num_features=256, or "
                f"omit {at}{name}"
            )
        )
