"""The Performer that estimates softmax attention, FAVOR+ (Choromanski et al., arXiv 2009.14794)."""

from enum import StrEnum
from functools import partial
from typing import ClassVar, final

from protlm.attention.linearized.base import Performer
from protlm.attention.linearized.features import FeatureMapFactory
from protlm.attention.linearized.normalization import normalizer_of
from protlm.attention.linearized.positive import PositiveFeatures, optimal_stretch
from protlm.attention.linearized.trigonometric import TrigonometricFeatures
from protlm.attention.ops.projection import Projection, RowNorms
from protlm.errors import UserError, refuse_unknown

# Features for a larger |q̂ + k̂|² overflow float32, and no practical number of them would suffice.
LARGEST_OPTIMAL_FOR = 200.0


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
    queries and keys need many features, and for |q̂ + k̂|² above about ln R the estimate is useless.
    Outputs and gradients do not underflow, even for large queries and keys (docs/decisions/0019).

    Args:
        head_dim: width K of a query and a key.
        num_features: features R of a position; pairs and sines with cosines need R/2 rows.
        estimator: one of the four above; all but `regularized` are unbiased.
        optimal_for: the mean |q̂ + k̂|² at which stretched positive features have their smallest
            variance (OPRF, arXiv 2205.15317); unbiased for any value; None for FAVOR+.
        antithetic: whether rows come in pairs ω, -ω.
        projection: `orthogonal` rows in blocks of K, `iid`, or products of `hadamard` matrices or
            of `givens` rotations, which are not quite uniform.
        normalizer: `denominator` divides by the sum of the weights; `rmsnorm` by the root mean
            square of the output.
        denominator_floor: the smallest denominator, for `trigonometric` only.
        redraw_every: optimizer steps between redraws; None keeps the first draw.
        backend: `auto` runs fused kernels on CUDA, after a check of their results, and PyTorch
            elsewhere; `torch` or `triton` always runs one of them.
        seed: the seed of the projections, together with the redraw index.
    """

    runtime_options: ClassVar[tuple[str, ...]] = ("backend",)
    advice: ClassVar[str] = (
        "weights of a trained softmax model, or the paper's model; watch the estimate"
    )

    def __init__(
        self,
        *,
        head_dim: int,
        num_features: int = 256,
        estimator: str = "positive",
        optimal_for: float | None = None,
        antithetic: bool = False,
        projection: str = "orthogonal",
        normalizer: str = "denominator",
        denominator_floor: float | None = None,
        redraw_every: int | None = 1000,
        backend: str = "auto",
        seed: int = 0,
    ) -> None:
        refuse_unknown("attention.estimator", estimator, Estimator)
        is_trigonometric = estimator == Estimator.trigonometric
        if is_trigonometric:
            _check_trigonometric(num_features, antithetic)
        elif denominator_floor is not None:
            raise UserError(
                f"attention.denominator_floor={denominator_floor} has no use with "
                f"attention.estimator={estimator}, whose sums of weights are positive and scaled "
                "by a factor of each query; set attention.denominator_floor=null"
            )
        if optimal_for is not None:
            _check_optimal_for(optimal_for, estimator)
        antithetic = antithetic or estimator == Estimator.hyperbolic
        super().__init__(
            feature_map=(
                TrigonometricFeatures if is_trigonometric else _positive(head_dim, optimal_for)
            ),
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
            normalizer=normalizer_of(
                normalizer, floor=denominator_floor, is_positive=not is_trigonometric
            ),
            redraw_every=redraw_every,
            seed=seed,
            backend=backend,
        )
        self.estimator = Estimator(estimator)
        self.is_trigonometric = is_trigonometric
        self.antithetic = antithetic
        self.optimal_for = optimal_for


def _positive(head_dim: int, optimal_for: float | None) -> FeatureMapFactory:
    if optimal_for is None:
        return PositiveFeatures
    return partial(PositiveFeatures, stretch=optimal_stretch(head_dim, optimal_for))


def _check_optimal_for(optimal_for: float, estimator: str) -> None:
    given = f"attention.optimal_for={optimal_for}"
    if estimator in (Estimator.trigonometric, Estimator.regularized):
        raise UserError(
            f"{given} is for positive features of N(0, I) rows, not for "
            f"attention.estimator={estimator}; set attention.optimal_for=null"
        )
    if not 0 < optimal_for <= LARGEST_OPTIMAL_FOR:
        raise UserError(
            f"{given} must be above 0 and at most {LARGEST_OPTIMAL_FOR:g} (the mean |q̂ + k̂|² of "
            "the queries and keys), or null"
        )


def _check_trigonometric(num_features: int, antithetic: bool) -> None:
    given = "attention.estimator=trigonometric"
    if num_features % 2:
        raise UserError(
            f"attention.num_features={num_features} must be an even number with {given}: every "
            "row has a sine and a cosine"
        )
    if antithetic:
        raise UserError(
            f"attention.antithetic=true has no effect with {given}: the sine and the cosine of -ω "
            "are those of ω; set attention.antithetic=false"
        )
