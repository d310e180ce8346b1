"""Feature maps φ with φ(q)·φ(k) an estimate of, or equal to, a kernel (arXiv 2009.14794)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.ops.products import product

# Maps the gradient of the features, BHLR, to that of the vectors, BHLK; may overwrite its argument.
Pullback = Callable[[Tensor], Tensor]


class Features(NamedTuple):
    """The features of vectors, and the pullback of their gradient."""

    phi_BHLR: Tensor
    pullback: Pullback


class FeatureMap(ABC):
    """A feature map of queries and keys, with one projection, RK, or None for coordinates.

    The features of a position depend only on the vector of the position.
    """

    # Features of each row or coordinate.
    features_per_row: ClassVar[int] = 1
    # Whether there are fused kernels; an instance may override it.
    has_fused: bool = False

    def __init__(self, projection_RK: Tensor | None = None) -> None:
        self.projection_RK = projection_RK

    def num_features(self, width: int) -> int:
        rows_RK = self.projection_RK
        return self.features_per_row * (width if rows_RK is None else len(rows_RK))

    def fused_rows(self, like: Tensor) -> tuple[Tensor, Tensor | None, float]:
        """Returns what fused kernels take in place of the map, on the device of a tensor.

        These are rows, RK; constants of positive features, R, or None for ReLU; and ε of ReLU.
        """
        raise NotImplementedError

    def queries(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Features:
        """Computes the features of queries, up to a factor per query that cancels in the output.

        Those of keys, by default. Only exponentials have a reference, to which φ(q) and φ(k) are
        relative.
        """
        return self.keys(q_BHLK)

    @abstractmethod
    def keys(self, k_BHLK: Tensor) -> Features:
        """Computes the features of keys."""


# Creates a feature map from the random rows ω_r, RK in the dtype of the computation; from None for
# features that are the coordinates of the vectors.
FeatureMapFactory = Callable[[Tensor | None], FeatureMap]


# With larger exponents, sums over long sequences would overflow float32.
_LARGEST_EXPONENT = 30.0


class Nonlinearity(NamedTuple):
    """A function f, the gradient of x from that of f(x) and x, and whether f is never negative."""

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    is_positive: bool


def _capped_exp(x: Tensor) -> Tensor:
    return x.clamp(max=_LARGEST_EXPONENT).exp_()


def _elu_plus_1(x: Tensor) -> Tensor:
    # exp(x) - 1 + 1 would lose digits of a small feature.
    return x.clamp(max=0).exp_().add_(x.relu())


NONLINEARITIES: Mapping[str, Nonlinearity] = {
    "relu": Nonlinearity(
        torch.relu, lambda df, x: torch.ops.aten.threshold_backward(df, x, 0), True
    ),
    "elu": Nonlinearity(_elu_plus_1, lambda df, x: df * x.clamp(max=0).exp_(), True),
    "exp": Nonlinearity(
        _capped_exp, lambda df, x: df * _capped_exp(x) * (x < _LARGEST_EXPONENT), True
    ),
    "abs": Nonlinearity(torch.abs, lambda df, x: df * x.sign(), True),
    "gelu": Nonlinearity(F.gelu, torch.ops.aten.gelu_backward, False),
    "sigmoid": Nonlinearity(torch.sigmoid, lambda df, x: df * x.sigmoid() * (-x).sigmoid_(), True),
    "tanh": Nonlinearity(torch.tanh, lambda df, x: df * (1 - x.tanh().square_()), False),
    "cos": Nonlinearity(torch.cos, lambda df, x: -df * x.sin(), False),
    "square_relu": Nonlinearity(
        lambda x: x.relu().square_(), lambda df, x: 2 * df * x.relu(), True
    ),
    "identity": Nonlinearity(torch.clone, lambda df, x: df, False),
}


@final
class GeneralizedFeatures(FeatureMap):
    """The features φ_r(x) = f(ω_r·x) + ε, or f(x_r) + ε without a projection, of queries and keys.

    As in the code released with the paper, x is scaled neither by K^(-1/4) nor by 1/√R: both would
    only change the size of ε relative to the features. exp is capped at exp(30).
    """

    def __init__(self, projection_RK: Tensor | None, *, kernel: str, epsilon: float) -> None:
        super().__init__(projection_RK)
        self._nonlinearity = NONLINEARITIES[kernel]
        self.has_fused = kernel == "relu"
        self._epsilon = epsilon

    def fused_rows(self, like: Tensor) -> tuple[Tensor, None, float]:
        rows_RK = self.projection_RK
        if rows_RK is None:
            rows_RK = torch.eye(like.shape[-1], device=like.device)
        return rows_RK.contiguous(), None, self._epsilon

    def keys(self, k_BHLK: Tensor) -> Features:
        rows_RK = self.projection_RK
        projected_BHLR = k_BHLK if rows_RK is None else product(k_BHLK, rows_RK)

        def pullback(dphi_BHLR: Tensor) -> Tensor:
            df_BHLR = dphi_BHLR.to(projected_BHLR.dtype)
            dprojected_BHLR = self._nonlinearity.gradient(df_BHLR, projected_BHLR).to(
                dphi_BHLR.dtype
            )
            return dprojected_BHLR if rows_RK is None else product(dprojected_BHLR, rows_RK.mT)

        return Features(self._nonlinearity.value(projected_BHLR).add_(self._epsilon), pullback)


# With larger exponents the features of a key would overflow float32; keys with |k̂|² = 80 do not
# occur in softmax attention.
_LARGEST_HALF_SQUARE = 40.0


@final
class TrigonometricFeatures(FeatureMap):
    """Features that estimate exp(q·k / √K) by exp(|q̂|²/2 + |k̂|²/2) cos(ω·(q̂ - k̂)), ω ~ N(0, I).

    φq = (sin ω_r·q̂, cos ω_r·q̂), without the factor exp(|q̂|²/2), which cancels in the output, and
    φk = exp(|k̂|²/2) (sin ω_r·k̂, cos ω_r·k̂) / R' for R' rows. Estimates of small weights have large
    variances and may be negative, and so may their sums: hence positive features in the paper.
    Exponents |k̂|²/2 are capped at 40.
    """

    features_per_row: ClassVar[int] = 2

    def __init__(self, projection_RK: Tensor | None) -> None:
        assert projection_RK is not None
        super().__init__(projection_RK)
        self._num_rows, self._head_dim = projection_RK.shape
        self._scaled_RK = projection_RK * self._head_dim**-0.25

    def queries(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Features:
        return _circle(q_BHLK, self._scaled_RK)

    def keys(self, k_BHLK: Tensor) -> Features:
        exponent_BHL1 = k_BHLK.square().sum(dim=-1, keepdim=True) * (self._head_dim**-0.5 / 2)
        factor_BHL1 = exponent_BHL1.clamp(max=_LARGEST_HALF_SQUARE).exp() / self._num_rows
        circle, circle_pullback = self.queries(k_BHLK)
        phi_BHLR = circle * factor_BHL1

        def pullback(dphi_BHLR: Tensor) -> Tensor:
            radial_BHL1 = (dphi_BHLR * phi_BHLR).sum(dim=-1, keepdim=True)
            radial_BHL1 = radial_BHL1 * (exponent_BHL1 < _LARGEST_HALF_SQUARE)
            dk_BHLK = circle_pullback(dphi_BHLR * factor_BHL1)
            return dk_BHLK.addcmul_(k_BHLK, radial_BHL1, value=self._head_dim**-0.5)

        return Features(phi_BHLR, pullback)


@final
class FourierFeatures(FeatureMap):
    """Random Fourier features, which estimate exp(-|q - k|²/2) = E cos(ω·(q - k)), ω ~ N(0, I).

    φ(x) = (sin ω_r·x, cos ω_r·x) / √R' for R' rows, for both queries and keys (arXiv 2103.02143,
    Theorem 1). |φ(x)| = 1, so an estimate is within [-1, 1].
    """

    features_per_row: ClassVar[int] = 2

    def __init__(self, projection_RK: Tensor | None) -> None:
        assert projection_RK is not None
        super().__init__(projection_RK)
        self._rows_RK, self._scale = projection_RK, 1 / math.sqrt(len(projection_RK))

    def keys(self, k_BHLK: Tensor) -> Features:
        return _circle(k_BHLK, self._rows_RK, scale=self._scale)


def _circle(x_BHLK: Tensor, rows: Tensor, *, scale: float | None = None) -> Features:
    """Computes (sin ω_r·x, cos ω_r·x), times a scale."""
    angles = product(x_BHLK, rows)
    phi_BHLR = torch.cat([angles.sin(), angles.cos()], dim=-1)
    if scale is not None:
        phi_BHLR.mul_(scale)

    def pullback(dphi_BHLR: Tensor) -> Tensor:
        sine, cosine = phi_BHLR.chunk(2, dim=-1)
        dsine, dcosine = dphi_BHLR.chunk(2, dim=-1)
        return product(dsine * cosine - dcosine * sine, rows.mT)

    return Features(phi_BHLR, pullback)
