"""Trigonometric features, of the softmax kernel (arXiv 2009.14794, section 2.3) and a Gaussian."""

import math
from typing import ClassVar, final

import torch
from torch import Tensor

from protlm.attention.linearized.features import FeatureMap, Features
from protlm.attention.ops.products import product

# With larger exponents the features of a key would overflow float32; keys with |k̂|² = 80 do not
# occur in softmax attention.
_LARGEST_EXPONENT = 40.0


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
        phi_BHLR = _sine_cosine(product(q_BHLK, self._scaled_RK))

        def pullback(dphi_BHLR: Tensor) -> Tensor:
            return product(_angle_gradient(dphi_BHLR, phi_BHLR), self._scaled_RK.mT)

        return Features(phi_BHLR, pullback)

    def keys(self, k_BHLK: Tensor) -> Features:
        exponent_BHL1 = self._exponent(k_BHLK)
        factor_BHL1 = exponent_BHL1.clamp(max=_LARGEST_EXPONENT).exp() / self._num_rows
        circle, circle_pullback = self.queries(k_BHLK)
        phi_BHLR = circle * factor_BHL1

        def pullback(dphi_BHLR: Tensor) -> Tensor:
            radial_BHL1 = (dphi_BHLR * phi_BHLR).sum(dim=-1, keepdim=True)
            radial_BHL1 = radial_BHL1 * (exponent_BHL1 < _LARGEST_EXPONENT)
            dk_BHLK = circle_pullback(dphi_BHLR * factor_BHL1)
            return dk_BHLK.addcmul_(k_BHLK, radial_BHL1, value=self._head_dim**-0.5)

        return Features(phi_BHLR, pullback)

    def log_factor(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Tensor:
        return self._exponent(q_BHLK)

    def _exponent(self, x_BHLK: Tensor) -> Tensor:
        return x_BHLK.square().sum(dim=-1, keepdim=True) * (self._head_dim**-0.5 / 2)


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

    def queries(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Features:
        return self.keys(q_BHLK)

    def keys(self, k_BHLK: Tensor) -> Features:
        phi_BHLR = _sine_cosine(product(k_BHLK, self._rows_RK)).mul_(self._scale)

        def pullback(dphi_BHLR: Tensor) -> Tensor:
            return product(_angle_gradient(dphi_BHLR, phi_BHLR), self._rows_RK.mT)

        return Features(phi_BHLR, pullback)

    def log_factor(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Tensor:
        """Returns log 1."""
        return torch.zeros_like(q_BHLK[..., :1])


def _sine_cosine(angles: Tensor) -> Tensor:
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _angle_gradient(dphi_BHLR: Tensor, phi_BHLR: Tensor) -> Tensor:
    sine, cosine = phi_BHLR.chunk(2, dim=-1)
    dsine, dcosine = dphi_BHLR.chunk(2, dim=-1)
    return dsine * cosine - dcosine * sine
