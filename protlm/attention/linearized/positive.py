"""Positive features: of the softmax kernel, FAVOR+ and, with a stretch, OPRF; and Hedgehog's.

Choromanski et al., arXiv 2009.14794, Lemma 1; Likhosherstov et al., arXiv 2205.15317, section 3;
Zhang et al., arXiv 2402.04347.
"""

import math
from abc import abstractmethod
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from protlm.attention.linearized.features import FeatureMap, Features, Pullback
from protlm.attention.ops.products import product

# Key features without a reference are at most exp(60): sums of larger ones would overflow float32.
_LARGEST_EXPONENT = 60.0
# exp2 is four times as fast as exp on a CPU.
LOG2_E = math.log2(math.e)


class ExponentialFeatureMap(FeatureMap):
    """A feature map of exponentials, whose logits may be far outside the range of a float.

    Linear attention subtracts a reference from the logits of each feature before exponentiating.
    2^(key logit - reference) · 2^(query logit + reference) does not depend on the reference, which
    therefore has no gradient. By default `queries` and `keys` have no reference.

    Logits are log₂ φ, and their pullbacks those of ln φ.
    """

    @abstractmethod
    def query_logits(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Tensor:
        """Computes the logits of queries, plus the reference."""

    @abstractmethod
    def key_logits(self, k_BHLK: Tensor) -> Tensor:
        """Computes the logits of keys."""

    @abstractmethod
    def query_pullback(self, dlogit_BHLR: Tensor) -> Tensor:
        """Returns the gradient of queries from that of ln φ."""

    @abstractmethod
    def key_pullback(self, dlogit_BHLR: Tensor, k_BHLK: Tensor) -> Tensor:
        """Returns the gradient of keys from that of ln φ."""

    def queries(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Features:
        """The largest feature of each query is 1."""
        logits_BHLR = self.query_logits(q_BHLK, reference_BH1R)
        # The maximum cancels in the normalized output, and therefore has no gradient.
        logits_BHLR.sub_(logits_BHLR.amax(dim=-1, keepdim=True))
        return exponential(logits_BHLR.exp2_(), self.query_pullback)

    def keys(self, k_BHLK: Tensor) -> Features:
        phi_BHLR = self.key_logits(k_BHLK).exp2_()
        return exponential(phi_BHLR, partial(self.key_pullback, k_BHLK=k_BHLK))


def exponential(phi_BHLR: Tensor, pullback: Pullback) -> Features:
    """Returns features that are exponentials, given the pullback of their logarithm."""
    return Features(phi_BHLR, lambda dphi_BHLR: pullback(dphi_BHLR.mul_(phi_BHLR)))


def logit_floor(dtype: torch.dtype) -> float:
    """Returns the logit of a padded key, which is finite, so that differences are not NaN."""
    return torch.finfo(dtype).min / 4


@final
class PositiveFeatures(ExponentialFeatureMap):
    """Positive features, whose products estimate exp(q·k / √K); no ε is added.

    With x̂ = x / K^(1/4) and rows ω_r ~ N(0, I), for any stretch s ≥ 1 the mean over r of

        s^K · exp((1 - s²)|ω_r|²/2 + s ω_r·(q̂ + k̂) - (|q̂|² + |k̂|²)/2)

    is an unbiased estimate. s = 1 is FAVOR+. The s that minimizes the variance at one |q̂ + k̂|²
    is OPRF (there s² = 1 - 4A). The output is invariant to multiplying feature r of all keys by a
    factor and dividing that of all queries by it, and to any factor per query. Therefore, with

        b_r = c - |k̂ - s ω_r|²/2,  a_r = s ω_r·q̂ + |ω_r|²/2,  c = min(s²K/2, 60)

    the features are, with a reference M_r for each feature,

        φk_r = exp(b_r - M_r),  φq_r = exp(a_r + M_r - max_r'(a_r' + M_r'))

    M_r is the b_r of a visible key (see `operands`), so that the sum of weights is at least 1 for
    queries and keys of any norm. Without a reference M_r = 0, and keys far from all rows underflow.
    """

    has_fused = True

    def __init__(self, projection_RK: Tensor | None, *, stretch: float = 1.0) -> None:
        assert projection_RK is not None
        super().__init__(projection_RK)
        self._head_dim = projection_RK.shape[1]
        self._scaled_RK = projection_RK * (stretch * self._head_dim**-0.25)
        self._log2_scaled_RK = self._scaled_RK * LOG2_E
        half_square_R = projection_RK.square().sum(dim=-1) / 2
        shift = min(stretch**2 * self._head_dim / 2, _LARGEST_EXPONENT)
        self._query_bias_R = half_square_R * LOG2_E
        self._key_bias_R = (shift - stretch**2 * half_square_R) * LOG2_E

    def fused_rows(self, like: Tensor) -> tuple[Tensor, Tensor, float]:
        """Returns w and c: φq_r φk_r is 2^(w_r·(q + k) + c_r), up to factors of query and key."""
        return self._log2_scaled_RK.contiguous(), self._query_bias_R + self._key_bias_R, 0.0

    def query_logits(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Tensor:
        bias_R = self._query_bias_R
        if reference_BH1R is None:
            return product(q_BHLK, self._log2_scaled_RK, bias_R)
        if reference_BH1R.shape[:2] == (1, 1):
            # Most tiles on a CPU have one head; the product then adds the reference at no cost.
            return product(q_BHLK, self._log2_scaled_RK, bias_R + reference_BH1R[0, 0, 0])
        return product(q_BHLK, self._log2_scaled_RK).add_(bias_R + reference_BH1R)

    def key_logits(self, k_BHLK: Tensor) -> Tensor:
        logits_BHLR = product(k_BHLK, self._log2_scaled_RK, self._key_bias_R)
        half_square_BHL1 = k_BHLK.square().sum(dim=-1, keepdim=True) * (self._head_dim**-0.5 / 2)
        return logits_BHLR.sub_(half_square_BHL1 * LOG2_E)

    def query_pullback(self, dlogit_BHLR: Tensor) -> Tensor:
        return product(dlogit_BHLR, self._scaled_RK.mT)

    def key_pullback(self, dlogit_BHLR: Tensor, k_BHLK: Tensor) -> Tensor:
        dlogit_BHL1 = dlogit_BHLR.sum(dim=-1, keepdim=True, dtype=k_BHLK.dtype)
        dk_BHLK = product(dlogit_BHLR, self._scaled_RK.mT).to(k_BHLK.dtype)
        return dk_BHLK.addcmul_(k_BHLK, dlogit_BHL1, value=-(self._head_dim**-0.5))


def optimal_stretch(head_dim: int, square_norm: float) -> float:
    """Returns the stretch s of the smallest variance at |q̂ + k̂|² = λ (2205.15317, Theorem 3.2).

    With A = (1 - 1/ρ)/8, ρ = (√((2λ + K)² + 8Kλ) - 2λ - K) / 4λ, s² = 1 - 4A = (1 + 1/ρ)/2.
    """
    sum_ = 2 * square_norm + head_dim
    # Rationalized, which avoids cancellation for small λ.
    inverse_rho = (math.sqrt(sum_**2 + 8 * head_dim * square_norm) + sum_) / (2 * head_dim)
    return math.sqrt((1 + inverse_rho) / 2)


@final
class ExponentialPairs(ExponentialFeatureMap):
    """The features φ(x) = [exp(x), exp(-x)] of every coordinate, R = 2K, without parameters.

    Zhang et al., arXiv 2402.04347, section 4.1; the learned matrix is applied to x before.
    """

    features_per_row: ClassVar[int] = 2

    def query_logits(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Tensor:
        logits_BHLR = self.key_logits(q_BHLK)
        return logits_BHLR if reference_BH1R is None else logits_BHLR.add_(reference_BH1R)

    def key_logits(self, k_BHLK: Tensor) -> Tensor:
        scaled_BHLK = k_BHLK * LOG2_E
        return torch.cat([scaled_BHLK, -scaled_BHLK], dim=-1)

    def query_pullback(self, dlogit_BHLR: Tensor) -> Tensor:
        plus_BHLK, minus_BHLK = dlogit_BHLR.chunk(2, dim=-1)
        return plus_BHLK - minus_BHLK

    def key_pullback(self, dlogit_BHLR: Tensor, k_BHLK: Tensor) -> Tensor:
        return self.query_pullback(dlogit_BHLR)
