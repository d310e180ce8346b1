"""Positive features of the softmax kernel: FAVOR+ and, with a stretch, OPRF.

Choromanski et al., arXiv 2009.14794, Lemma 1; Likhosherstov et al., arXiv 2205.15317, section 3.
"""

import math
from typing import final

from torch import Tensor

from protlm.attention.performer.features import FeatureMap, Features
from protlm.attention.performer.products import product

# Larger exponents of a key would take sums over long sequences out of float32's range.
_LARGEST_EXPONENT = 60.0
# exp2 is four times as fast as exp on a CPU.
_LOG2_E = math.log2(math.e)


@final
class PositiveFeatures(FeatureMap):
    """Estimates exp(q·k / √K) without an eps and without a maximum over the sequence.

    With x̂ = x / K^(1/4) and rows ω_r ~ N(0, I), for any s ≥ 1 the mean over r of

        s^K · exp((1 - s²)|ω_r|²/2 + s ω_r·(q̂ + k̂) - (|q̂|² + |k̂|²)/2)

    is an unbiased estimate. s = 1 is FAVOR+. The s that minimises the variance at one |q̂ + k̂|²
    gives OPRF (s² = 1 - 4A there). Multiplying key features by exp(c - |ω_r|²/2) and dividing
    query features by it changes the product by no more than a factor of the query:

        φk_r = exp(c - |k̂ - s ω_r|²/2)                            in (0, exp(c)], c = s²K/2
        φq_r = exp(s ω_r·q̂ + |ω_r|²/2 - max_r'(the same))         in (0, 1]

    c is what |s ω_r|²/2 is in the mean. Where it is above 60 exponents are capped there, which none
    reaches that is of use. Keys too far from all rows have no weight left in float32: at K = 64 the
    first outputs without any appear where coordinates have a standard deviation of 4, far beyond
    where the estimate is of use.

    Args:
        projection_RK: the rows ω_r.
        stretch: s.
    """

    def __init__(self, projection_RK: Tensor | None, *, stretch: float = 1.0) -> None:
        assert projection_RK is not None
        num_rows, self._head_dim = projection_RK.shape
        self._scaled_RK = projection_RK * (stretch * self._head_dim**-0.25)
        self._log2_scaled_RK = self._scaled_RK * _LOG2_E
        half_square_R = projection_RK.square().sum(dim=-1) / 2
        shift = stretch**2 * self._head_dim / 2
        self._is_capped = shift > _LARGEST_EXPONENT
        self._query_bias_R = half_square_R * _LOG2_E
        self._key_bias_R = (shift - stretch**2 * half_square_R) * _LOG2_E
        self._log_constant = self._head_dim * math.log(stretch) - math.log(num_rows) - shift

    def queries(self, q_BHLK: Tensor) -> Features:
        """See `FeatureMap.queries`."""
        logits_BHLR = product(q_BHLK, self._log2_scaled_RK, self._query_bias_R)
        # The maximum cancels when the output is normalised, so it carries no gradient.
        phi_BHLR = logits_BHLR.sub_(logits_BHLR.amax(dim=-1, keepdim=True)).exp2_()

        def pullback(dphi_BHLR: Tensor) -> Tensor:
            return product(dphi_BHLR.mul_(phi_BHLR), self._scaled_RK.mT)

        return Features(phi_BHLR, pullback)

    def keys(self, k_BHLK: Tensor) -> Features:
        """See `FeatureMap.keys`."""
        logits_BHLR = product(k_BHLK, self._log2_scaled_RK, self._key_bias_R)
        logits_BHLR.sub_(self._half_square(k_BHLK) * _LOG2_E)
        is_above = logits_BHLR > _LARGEST_EXPONENT * _LOG2_E if self._is_capped else None
        if is_above is not None:
            logits_BHLR.clamp_(max=_LARGEST_EXPONENT * _LOG2_E)
        phi_BHLR = logits_BHLR.exp2_()

        def pullback(dphi_BHLR: Tensor) -> Tensor:
            dlogit_BHLR = dphi_BHLR.mul_(phi_BHLR)
            if is_above is not None:
                dlogit_BHLR.masked_fill_(is_above, 0)
            dlogit_BHL1 = dlogit_BHLR.sum(dim=-1, keepdim=True)
            dk_BHLK = product(dlogit_BHLR, self._scaled_RK.mT)
            return dk_BHLK.addcmul_(k_BHLK, dlogit_BHL1, value=-(self._head_dim**-0.5))

        return Features(phi_BHLR, pullback)

    def log_factor(self, q_BHLK: Tensor) -> Tensor:
        """See `FeatureMap.log_factor`."""
        logits_BHLR = product(q_BHLK, self._log2_scaled_RK, self._query_bias_R)
        maximum_BHL1 = logits_BHLR.amax(dim=-1, keepdim=True) / _LOG2_E
        return maximum_BHL1 - self._half_square(q_BHLK) + self._log_constant

    def _half_square(self, x_BHLK: Tensor) -> Tensor:
        return x_BHLK.square().sum(dim=-1, keepdim=True) * (self._head_dim**-0.5 / 2)


def optimal_stretch(head_dim: int, square_norm: float) -> float:
    """The stretch s of least variance at |q̂ + k̂|² = `square_norm` (arXiv 2205.15317, Theorem 3.2).

    With A = (1 - 1/ρ)/8, ρ = (√((2λ + K)² + 8Kλ) - 2λ - K) / 4λ, s² = 1 - 4A = (1 + 1/ρ)/2.
    """
    sum_ = 2 * square_norm + head_dim
    # ρ times (√ + 2λ + K), which does not cancel for small λ.
    inverse_rho = (math.sqrt(sum_**2 + 8 * head_dim * square_norm) + sum_) / (2 * head_dim)
    return math.sqrt((1 + inverse_rho) / 2)
