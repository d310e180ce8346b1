"""The Performer that estimates softmax attention, FAVOR+ (Choromanski et al., arXiv 2009.14794)."""

from enum import StrEnum
from functools import partial
from typing import Annotated, ClassVar, final

from protlm.attention.linearized.base import Performer
from protlm.attention.linearized.features import FeatureMapFactory, TrigonometricFeatures
from protlm.attention.linearized.gates import Decay
from protlm.attention.linearized.normalization import denominator
from protlm.attention.linearized.positive import PositiveFeatures, optimal_stretch
from protlm.attention.linearized.selection import Backend
from protlm.attention.ops.projection import Projection, RowNorms, RowSampling
from protlm.config.fields import Range, above, at_least
from protlm.system.errors import OptionError

# Features for a larger |q̂ + k̂|² overflow float32, and no practical number of them would suffice.
LARGEST_OPTIMAL_FOR = 200.0
_OPTIMAL_FOR = Range(
    f"above 0 and at most {LARGEST_OPTIMAL_FOR:g} (the mean |q̂ + k̂|² of the queries and keys)",
    lambda x: 0 < x <= LARGEST_OPTIMAL_FOR,
)


class Estimator(StrEnum):
    """The estimators of the softmax kernel, by the names of arXiv 2009.14794."""

    positive = "positive"
    hyperbolic = "hyperbolic"
    trigonometric = "trigonometric"
    regularized = "regularized"


@final
class PerformerSoftmax(Performer):
    """Attention with a random estimate of exp(q·k / √K), normalized over the keys.

    With x̂ = x / K^(1/4) and random rows ω_r the estimate is the mean over r of

        positive        exp(ω_r·(q̂ + k̂) - (|q̂|² + |k̂|²)/2), ω_r ~ N(0, I)            (Lemma 1)
        hyperbolic      the same with rows in pairs ω, -ω: SM-hyp+                       (Lemma 1)
        regularized     the same with |ω_r| = √K, an estimate of SMREG ≤ the kernel    (Theorem 1)
        trigonometric   exp((|q̂|² + |k̂|²)/2) cos(ω_r·(q̂ - k̂)), two features for each row

    The relative standard deviation of one positive weight is √((exp(|q̂ + k̂|²) - 1) / R): large
    queries and keys need many features, and for |q̂ + k̂|² above about ln R the estimate is
    useless. All but `regularized` are unbiased. Outputs and gradients do not underflow, even for
    large queries and keys (docs/decisions/0019).
    """

    runtime_options: ClassVar[tuple[str, ...]] = ("backend",)
    advice: ClassVar[str] = (
        "weights of a trained softmax model, or the paper's model; watch the estimate"
    )

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int = 1,
        model_dim: int = 1,
        num_features: Annotated[int, at_least(1)] = 256,
        estimator: Annotated[str, Estimator] = "positive",
        optimal_for: Annotated[float | None, _OPTIMAL_FOR] = None,
        antithetic: bool = False,
        projection: Annotated[str, RowSampling] = "orthogonal",
        denominator_floor: Annotated[float | None, above(0)] = None,
        decay: Annotated[str, Decay] = "none",
        redraw_every: Annotated[int | None, at_least(1)] = 1000,
        backend: Annotated[str, Backend] = "auto",
        seed: int = 0,
    ) -> None:
        is_trigonometric = estimator == Estimator.trigonometric
        feature_map: FeatureMapFactory = PositiveFeatures
        if is_trigonometric:
            _check_trigonometric(num_features, antithetic)
            feature_map = TrigonometricFeatures
        elif denominator_floor is not None:
            raise OptionError(
                lambda at: (
                    f"{at}denominator_floor={denominator_floor} has no use with "
                    f"{at}estimator={estimator}, whose sums of weights are positive and scaled by "
                    f"a factor of each query; set {at}denominator_floor=null"
                )
            )
        if optimal_for is not None:
            if estimator not in (Estimator.positive, Estimator.hyperbolic):
                raise OptionError(
                    lambda at: (
                        f"{at}optimal_for={optimal_for} is for positive features of N(0, I) rows, "
                        f"not for {at}estimator={estimator}; set {at}optimal_for=null"
                    )
                )
            feature_map = partial(PositiveFeatures, stretch=optimal_stretch(head_dim, optimal_for))
        antithetic = antithetic or estimator == Estimator.hyperbolic
        super().__init__(
            feature_map=feature_map,
            num_features=num_features,
            projection=Projection(
                num_features=num_features // 2 if is_trigonometric else num_features,
                head_dim=head_dim,
                sampling=projection,
                row_norms=(
                    RowNorms.sqrt_dim if estimator == Estimator.regularized else RowNorms.chi
                ),
                antithetic=antithetic,
            ),
            normalizer=denominator(denominator_floor, is_positive=not is_trigonometric),
            redraw_every=redraw_every,
            seed=seed,
            backend=backend,
        )
        self._let_decay(decay, num_heads=num_heads, model_dim=model_dim)
        self.estimator = Estimator(estimator)
        self.is_trigonometric = is_trigonometric
        self.antithetic = antithetic
        self.optimal_for = optimal_for


def _check_trigonometric(num_features: int, antithetic: bool) -> None:
    if num_features % 2:
        raise OptionError(
            lambda at: (
                f"{at}num_features={num_features} must be an even number with "
                f"{at}estimator=trigonometric: every row has a sine and a cosine"
            )
        )
    if antithetic:
        raise OptionError(
            lambda at: (
                f"{at}antithetic=true has no effect with {at}estimator=trigonometric: the sine and "
                f"the cosine of -ω are those of ω; set {at}antithetic=false"
            )
        )
