"""Weighted means by sums of exponentials that neither overflow nor vanish."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.ops.numerics import accum_dtype

# Rows of a block that running sums process one after the other, in all blocks in parallel.
_STEPS = 16


def floor_of(x: Tensor) -> float:
    """Returns the exponent of a position of weight 0: finite, so that differences are not NaN."""
    return torch.finfo(accum_dtype(x)).min / 4


@dataclass(frozen=True)
class SoftmaxSums:
    """The sums Σ_j e^(x_j - r) v_j and Σ_j e^(x_j - r) and their reference r.

    The shapes are (..., rows, channels). r is about the largest exponent; it cancels in the mean,
    and so has no gradient. The denominator may have one channel for all, and the reference one row.
    """

    reference: Tensor
    numerator: Tensor
    denominator: Tensor

    @classmethod
    def none(cls, exponents: Tensor, values: Tensor) -> "SoftmaxSums":
        """Creates empty sums, of the shapes of the exponents and the values."""
        return cls(
            torch.full_like(exponents, floor_of(exponents)),
            torch.zeros_like(values),
            torch.zeros_like(exponents),
        )

    @classmethod
    def terms(cls, exponents: Tensor, values: Tensor) -> "SoftmaxSums":
        """Creates one term in each row, with one reference for all rows."""
        reference = exponents.detach().amax(dim=-2, keepdim=True)
        weights = (exponents - reference).exp()
        return cls(reference, weights * values, weights)

    def __getitem__(self, rows_B: Tensor) -> "SoftmaxSums":
        return self.each(lambda x: x[rows_B])

    def each(self, function: Callable[[Tensor], Tensor]) -> "SoftmaxSums":
        return replace(self.linear(function), reference=function(self.reference))

    def linear(self, function: Callable[[Tensor], Tensor]) -> "SoftmaxSums":
        """Applies a linear function to both sums, whose reference stays the same."""
        return SoftmaxSums(self.reference, function(self.numerator), function(self.denominator))

    def total(self) -> "SoftmaxSums":
        """Sums over the rows, which have one reference."""
        return self.linear(lambda x: x.sum(dim=-2, keepdim=True))

    def mixed(self, weights: Tensor) -> "SoftmaxSums":
        """Sums over the rows, which have one reference, with weights (..., rows out, rows in)."""
        # Axes that the weights lack, or have in size 1, are joined with the channels: every matrix
        # of weights is used in one product for all of them, and never copied.
        return self.linear(lambda x: torch.einsum("...ml,b...lc->b...mc", weights, x))

    def scaled(self, factors: Tensor) -> "SoftmaxSums":
        return self.linear(lambda x: factors * x)

    def plus(self, other: "SoftmaxSums") -> "SoftmaxSums":
        reference = torch.maximum(self.reference, other.reference)
        mine, others = ((x.reference - reference).exp() for x in (self, other))
        return SoftmaxSums(
            reference,
            self.numerator * mine + other.numerator * others,
            self.denominator * mine + other.denominator * others,
        )

    def shifted(self, count: int, dim: int) -> "SoftmaxSums":
        """Moves the sums by `count` places along an axis; the first places have empty sums."""
        length = self.numerator.shape[dim]
        return self._padded([0, 0] * (-dim - 1) + [count, 0]).each(
            lambda x: x.narrow(dim, 0, length)
        )

    def _padded(self, padding: list[int]) -> "SoftmaxSums":
        """Surrounds the sums by empty ones."""
        reference = F.pad(self.reference, padding, value=floor_of(self.reference))
        return replace(self, reference=reference).linear(lambda x: F.pad(x, padding))

    def running(self) -> "SoftmaxSums":
        """Computes the sums of each row and all before it, in time linear in the rows.

        A row does not depend on later rows, so no later exponent makes an earlier sum underflow.
        """
        length = self.numerator.shape[-2]
        if length <= _STEPS:
            return self._scan()
        filled = self._padded([0, 0, 0, -length % _STEPS])
        within = filled.each(lambda x: x.unflatten(-2, (-1, _STEPS)))._scan()
        before = within.each(lambda x: x[..., -1, :]).running().shifted(1, -2)
        sums = within.plus(before.each(lambda x: x[..., None, :]))
        return sums.each(lambda x: x.flatten(-3, -2)[..., :length, :])

    def _scan(self) -> "SoftmaxSums":
        """Computes `running` one row after the other."""
        reference = self.reference.cummax(dim=-2).values
        own = self.scaled((self.reference - reference).exp())
        decay = (reference[..., :-1, :] - reference[..., 1:, :]).exp()

        def accumulate(terms: Tensor) -> Tensor:
            first, *others = terms.unbind(dim=-2)
            sums = [first]
            for term, factor in zip(others, decay.unbind(dim=-2), strict=True):
                sums.append(torch.addcmul(term, sums[-1], factor))
            return torch.stack(sums, dim=-2)

        return SoftmaxSums(reference, accumulate(own.numerator), accumulate(own.denominator))

    def mean(self) -> Tensor:
        """Computes the weighted mean; 0 where there is no weight."""
        # Near the smallest normal number, gradients would not be finite (`inverse_of_weight`).
        has_none = self.denominator <= torch.finfo(self.denominator.dtype).tiny * 2**27
        return self.numerator / self.denominator.masked_fill(has_none, torch.inf)


def triangle(exponents: Tensor, values: Tensor, weights: Tensor) -> SoftmaxSums:
    """Computes row i's sums over j ≤ i of weights_ij e^(x_j), in blocks of a power of two of rows.

    Rows of the second half see all keys of the first half, so that a product with one reference,
    the largest exponent of the first half, loses nothing that matters to any of them. Two smaller
    triangles remain. One reference for the whole block would lose a row whose own keys are far
    below a later one. Exponents are (..., rows, channels or 1).
    """
    size = exponents.shape[-2]
    if size == 1:
        return SoftmaxSums.terms(exponents, values).scaled(weights)
    halves = (2, size // 2)
    x, v = exponents.unflatten(-2, halves), values.unflatten(-2, halves)
    quarters = weights.unflatten(-1, halves).unflatten(-3, halves)
    inner = quarters.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    sums = triangle(x, v, inner)
    first, second = (sums.each(lambda x, half=half: x[..., half, :, :]) for half in (0, 1))
    before = SoftmaxSums.terms(x[..., 0, :, :], v[..., 0, :, :]).mixed(quarters[..., 1, :, 0, :])
    second = second.plus(before)
    return SoftmaxSums(
        torch.cat([first.reference, second.reference], dim=-2),
        torch.cat([first.numerator, second.numerator], dim=-2),
        torch.cat([first.denominator, second.denominator], dim=-2),
    )
