"""The variance of FAVOR+'s estimate of a softmax weight (arXiv 2009.14794, Lemma 2).

With x̂ = x / K^(1/4), z = q̂ + k̂ and Δ = q̂ - k̂, let f be the estimate of exp(q̂·k̂) from one row ω,
or from one pair of rows. Its second moment E f² / exp(2 q̂·k̂) is

    exp(|z|²)                            positive
    cosh(|z|²)                           rows in pairs ω, -ω: hyperbolic
    cosh(|Δ|²)                           trigonometric
    G exp(ρ|z|²)                         positive with a stretch s: OPRF (2205.15317)
    G (exp(ρ|z|²) + exp(-|z|²)) / 2      the same, rows in pairs

with ρ = 1 / (2s² - 1) and G = (s⁴ρ)^(K/2). Here f is that of `PositiveFeatures`, and
E exp(a|ω|² + b·ω) is (1 - 2a)^(-K/2) exp(|b|² / (2 - 4a)), with a = 1 - s² and b = 2sz. The mean of
n independent f has the relative variance (second moment - 1) / n.

Orthogonal rows have a smaller variance (Theorem 2). So do the rows of `regularized` around the
kernel that they estimate. For both, the prediction is an upper bound.
"""

import math
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from protlm.attention.linearized.positive import optimal_stretch
from protlm.attention.ops.numerics import accum_dtype, in_float64, zero_padding

# exp(|z|²) overflows for large queries and keys. A relative error of 10⁶ is as useless as a larger
# one, and keeps infinities out of the log.
LARGEST_ERROR = 1e6


class SoftmaxEstimate(Protocol):
    """A mechanism that estimates softmax weights by random features, as `PerformerSoftmax` does."""

    num_features: int
    projection: Tensor | None
    is_trigonometric: bool
    antithetic: bool
    optimal_for: float | None


def pair_sums(q_BHLK: Tensor, k_BHLK: Tensor, mask_BL: Tensor, *, causal: bool) -> Tensor:
    """Computes sums over all pairs of a query and a visible key, without padding, 3H.

    The rows are the sums of |q̂|² + |k̂|², the sums of q̂·k̂, and the number of pairs. They can be
    added over batches and ranks. No tensor has the size L×L: the sum of q̂·k̂ is that of q̂ times
    sums of k̂.
    """
    dtype = accum_dtype(q_BHLK)
    scale = q_BHLK.shape[-1] ** -0.25
    q_BHLK, k_BHLK = (zero_padding(x.to(dtype) * scale, mask_BL) for x in (q_BHLK, k_BHLK))
    seen_BL = mask_BL.to(dtype)
    # The number of keys visible to a query, of queries that see a key, and the sum of visible keys.
    total_B1 = seen_BL.sum(dim=1, keepdim=True)
    num_keys_BL = seen_BL.cumsum(dim=1) if causal else total_B1.expand_as(seen_BL)
    num_queries_BL = total_B1 - num_keys_BL + seen_BL if causal else num_keys_BL
    seen_keys = k_BHLK.cumsum(dim=2) if causal else k_BHLK.sum(dim=2, keepdim=True)
    squares_BHL = q_BHLK.square().sum(dim=-1) * num_keys_BL[:, None]
    squares_BHL = squares_BHL + k_BHLK.square().sum(dim=-1) * num_queries_BL[:, None]
    products_BHL = (q_BHLK * seen_keys).sum(dim=-1)
    pairs_BHL = (num_keys_BL * seen_BL)[:, None].expand_as(squares_BHL)
    return torch.stack([x.sum(dim=(0, 2)) for x in (squares_BHL, products_BHL, pairs_BHL)])


class SquareNorms(NamedTuple):
    """The means of |q̂ + k̂|² and |q̂ - k̂|² over pairs of a query and a key, float64."""

    sum_H: Tensor
    difference_H: Tensor

    @classmethod
    def of(cls, sums_3H: Tensor) -> Self:
        squares_H, products_H, pairs_H = in_float64(sums_3H)
        squares_H, products_H = (x_H / pairs_H.clamp(min=1) for x_H in (squares_H, products_H))
        return cls(squares_H + 2 * products_H, squares_H - 2 * products_H)


def deciding_norm(mechanism: SoftmaxEstimate, norms: SquareNorms) -> Tensor:
    """Returns the norm that the variance grows with: |Δ|² for trigonometric features, else |z|²."""
    return norms.difference_H if mechanism.is_trigonometric else norms.sum_H


def relative_error(mechanism: SoftmaxEstimate, norms: SquareNorms) -> Tensor:
    """Returns the relative standard deviation of the estimated weight of a pair with these norms.

    There is one per head, in float64, at most `LARGEST_ERROR`.

    >>> from protlm.attention.performer_softmax import PerformerSoftmax
    >>> norms = SquareNorms(torch.tensor([2.0, 5.55, 16.0]), torch.zeros(3))
    >>> relative_error(PerformerSoftmax(head_dim=64, num_features=256), norms).tolist()
    [0.157..., 1.00..., 186.3...]
    """
    log_moment_H = _log_second_moment(mechanism, norms)
    num_draws = mechanism.num_features / (2 if _comes_in_pairs(mechanism) else 1)
    # Rounding may make the variance negative near |z| = 0.
    variance_H = torch.expm1(log_moment_H.clamp(min=0)) / num_draws
    return variance_H.sqrt().clamp(max=LARGEST_ERROR)


def _log_second_moment(mechanism: SoftmaxEstimate, norms: SquareNorms) -> Tensor:
    """Returns ln(E f² / exp(2 q̂·k̂)) of one row or pair of rows, one per head."""
    assert mechanism.projection is not None
    head_dim, lambda_ = mechanism.projection.shape[1], mechanism.optimal_for
    stretch = 1.0 if lambda_ is None else optimal_stretch(head_dim, lambda_)
    rho = 1 / (2 * stretch**2 - 1)
    norm_H = in_float64(deciding_norm(mechanism, norms))
    log_moment_H = rho * norm_H
    if _comes_in_pairs(mechanism):
        log_moment_H = torch.logaddexp(log_moment_H, -norm_H) - math.log(2)
    return log_moment_H + head_dim / 2 * math.log(stretch**4 * rho)


def _comes_in_pairs(mechanism: SoftmaxEstimate) -> bool:
    """Returns whether a row has two features: of ω and -ω, or sine and cosine."""
    return mechanism.antithetic or mechanism.is_trigonometric
