"""Feature maps: φ with φ(q)·φ(k) proportional to, or an estimate of, a kernel (arXiv 2009.14794).

`x` is one side's vectors, `projection_RK` the random rows ω_r, or none where the features are the
coordinates of x themselves.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, final

from torch import Tensor

# Larger shifts of the key exponent would take sums over long sequences out of float32's range.
_LARGEST_SHIFT = 60.0


class FeatureMap(ABC):
    """The features of one side, queries or keys, and their derivative."""

    @abstractmethod
    def __call__(self, x_BHLK: Tensor, projection_RK: Tensor | None) -> Tensor:
        """Returns the features of x, BHLR."""

    @abstractmethod
    def gradient(
        self, dphi_BHLR: Tensor, phi_BHLR: Tensor, x_BHLK: Tensor, projection_RK: Tensor | None
    ) -> Tensor:
        """Returns the gradient of x from that of its features; features of 0 pass none on."""


class FeatureMaps(NamedTuple):
    """The two sides of a kernel."""

    queries: FeatureMap
    keys: FeatureMap


def softmax_features(head_dim: int) -> FeatureMaps:
    """FAVOR+ in a form that needs neither an eps nor a maximum over the sequence.

    With x̂ = x / K^(1/4), the positive features of Lemma 1, exp(ω·x̂ - |x̂|²/2), are multiplied by
    exp(s₀ - |ω|²/2) for keys and its inverse, times a constant of the query, for queries. The
    products change by a constant of the query only, which normalising removes:

        φk_r = exp(s₀ - |k̂ - ω_r|²/2)                         in (0, exp(s₀)], s₀ = min(K/2, 60)
        φq_r = exp(ω_r·q̂ + |ω_r|²/2 - max_r'(the same))       in (0, 1]

    So no key, position or sample influences the features of another. Keys too far from all rows
    have no weight left in float32: at K = 64 the first rows without any appear where coordinates
    have a standard deviation of 4, far beyond where the estimate is of use.
    """
    scale = head_dim**-0.25
    return FeatureMaps(
        queries=_SoftmaxQueries(scale),
        keys=_SoftmaxKeys(scale, shift=min(head_dim / 2, _LARGEST_SHIFT)),
    )


def relu_features(epsilon: float) -> FeatureMaps:
    """φ_r = relu(ω_r·x) + ε for both sides (arXiv 2009.14794, A.4 and D.3)."""
    both = _Relu(epsilon)
    return FeatureMaps(queries=both, keys=both)


@final
@dataclass(frozen=True)
class _SoftmaxQueries(FeatureMap):
    scale: float

    def __call__(self, x_BHLK: Tensor, projection_RK: Tensor | None) -> Tensor:
        assert projection_RK is not None
        logits_BHLR = (x_BHLK * self.scale) @ projection_RK.mT + _half_square(projection_RK)
        # The maximum cancels when the output is normalised, so it carries no gradient.
        return (logits_BHLR - logits_BHLR.detach().amax(dim=-1, keepdim=True)).exp()

    def gradient(
        self, dphi_BHLR: Tensor, phi_BHLR: Tensor, x_BHLK: Tensor, projection_RK: Tensor | None
    ) -> Tensor:
        assert projection_RK is not None
        return (dphi_BHLR * phi_BHLR) @ projection_RK * self.scale


@final
@dataclass(frozen=True)
class _SoftmaxKeys(FeatureMap):
    scale: float
    shift: float

    def __call__(self, x_BHLK: Tensor, projection_RK: Tensor | None) -> Tensor:
        assert projection_RK is not None
        scaled_BHLK = x_BHLK * self.scale
        distance_BHLR = _half_square(scaled_BHLK)[..., None] + _half_square(projection_RK)
        return (self.shift - distance_BHLR + scaled_BHLK @ projection_RK.mT).exp()

    def gradient(
        self, dphi_BHLR: Tensor, phi_BHLR: Tensor, x_BHLK: Tensor, projection_RK: Tensor | None
    ) -> Tensor:
        assert projection_RK is not None
        dlogit_BHLR = dphi_BHLR * phi_BHLR
        dlogit_BHL1 = dlogit_BHLR.sum(dim=-1, keepdim=True)
        dscaled_BHLK = dlogit_BHLR @ projection_RK - dlogit_BHL1 * (x_BHLK * self.scale)
        return dscaled_BHLK * self.scale


@final
@dataclass(frozen=True)
class _Relu(FeatureMap):
    epsilon: float

    def __call__(self, x_BHLK: Tensor, projection_RK: Tensor | None) -> Tensor:
        projected_BHLR = x_BHLK if projection_RK is None else x_BHLK @ projection_RK.mT
        return projected_BHLR.relu() + self.epsilon

    def gradient(
        self, dphi_BHLR: Tensor, phi_BHLR: Tensor, x_BHLK: Tensor, projection_RK: Tensor | None
    ) -> Tensor:
        dprojected_BHLR = dphi_BHLR * (phi_BHLR > self.epsilon)
        return dprojected_BHLR if projection_RK is None else dprojected_BHLR @ projection_RK


def _half_square(rows: Tensor) -> Tensor:
    return rows.square().sum(dim=-1) / 2
