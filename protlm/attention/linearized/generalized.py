"""Features of generalized kernels: a nonlinearity of projections or of coordinates.

Choromanski et al., arXiv 2009.14794, section 2.2, A.4 and D.3.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.linearized.features import FeatureMap, Features
from protlm.attention.ops.products import product

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


def _relu_gradient(df: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward(df, x, 0)


NONLINEARITIES: Mapping[str, Nonlinearity] = {
    "relu": Nonlinearity(torch.relu, _relu_gradient, True),
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
        """Returns the rows, without a projection the identity, and ε."""
        rows_RK = self.projection_RK
        if rows_RK is None:
            rows_RK = torch.eye(like.shape[-1], device=like.device)
        return rows_RK.contiguous(), None, self._epsilon

    def queries(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Features:
        return self.keys(q_BHLK)

    def log_factor(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Tensor:
        """Returns log c; the kernel is the mean over the features."""
        return torch.full_like(q_BHLK[..., :1], -math.log(self.num_features(q_BHLK.shape[-1])))

    def keys(self, k_BHLK: Tensor) -> Features:
        rows_RK = self.projection_RK
        projected_BHLR = k_BHLK if rows_RK is None else product(k_BHLK, rows_RK)

        def pullback(dphi_BHLR: Tensor) -> Tensor:
            dprojected_BHLR = self._nonlinearity.gradient(dphi_BHLR, projected_BHLR)
            return dprojected_BHLR if rows_RK is None else product(dprojected_BHLR, rows_RK.mT)

        return Features(self._nonlinearity.value(projected_BHLR).add_(self._epsilon), pullback)
