"""Weighted means by sums of exponentials that neither overflow nor vanish."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.precision import wide_dtype

# Rows that running sums take one after the other, those of many blocks at a time.
_STEPS = 16


def floor_of(x: Tensor) -> float:
    """The exponent of a position without weight: finite, so that none minus none is not NaN."""
    return torch.finfo(wide_dtype(x)).min / 4


@dataclass(frozen=True)
class Sums:
    """Σ_j e^(x_j - r) v_j and Σ_j e^(x_j - r) beside the reference r, (..., rows, channels).

    The reference is the largest exponent x_j, about: it cancels in the mean, and so it carries no
    gradient. The denominator may have one channel for all those of the numerator, and the
    reference one row for all. The first axis counts samples, as in a `State`.
    """

    reference: Tensor
    numerator: Tensor
    denominator: Tensor

    @classmethod
    def none(cls, exponents: Tensor, values: Tensor) -> "Sums":
        """Sums over nothing, of the shapes of the exponents and the values."""
        return cls(
            torch.full_like(exponents, floor_of(exponents)),
            torch.zeros_like(values),
            torch.zeros_like(exponents),
        )

    @classmethod
    def terms(cls, exponents: Tensor, values: Tensor) -> "Sums":
        """One term in each row, with one reference for all rows."""
        reference = exponents.detach().amax(dim=-2, keepdim=True)
        weights = (exponents - reference).exp()
        return cls(reference, weights * values, weights)

    def __getitem__(self, rows_B: Tensor) -> "Sums":
        """See `State`."""
        return self.each(lambda x: x[rows_B])

    def each(self, function: Callable[[Tensor], Tensor]) -> "Sums":
        """A function of each of the three tensors."""
        return Sums(function(self.reference), function(self.numerator), function(self.denominator))

    def total(self) -> "Sums":
        """The sum over the rows, which have one reference."""
        numerator, denominator = (
            x.sum(dim=-2, keepdim=True) for x in (self.numerator, self.denominator)
        )
        return Sums(self.reference, numerator, denominator)

    def mixed(self, weights: Tensor) -> "Sums":
        """Sums over the rows, which have one reference, with weights (..., rows out, rows in)."""
        # Axes that the weights lack, or have in size 1, are laid beside the channels: every
        # matrix of weights is used in one product for all of them, and never copied.
        numerator, denominator = (
            torch.einsum("...ml,b...lc->b...mc", weights, x)
            for x in (self.numerator, self.denominator)
        )
        return Sums(self.reference, numerator, denominator)

    def scaled(self, factors: Tensor) -> "Sums":
        """The sums times factors."""
        return Sums(self.reference, factors * self.numerator, factors * self.denominator)

    def plus(self, other: "Sums") -> "Sums":
        """Both sums together, beside the larger reference."""
        reference = torch.maximum(self.reference, other.reference)
        mine, others = ((x.reference - reference).exp() for x in (self, other))
        return Sums(
            reference,
            self.numerator * mine + other.numerator * others,
            self.denominator * mine + other.denominator * others,
        )

    def shifted(self, count: int, dim: int) -> "Sums":
        """Moved on by `count` places along an axis; the first places have no sum."""
        padding = [0, 0] * (-dim - 1) + [count, 0]
        length = self.numerator.shape[dim]
        reference, numerator, denominator = (
            F.pad(x, padding, value=value).narrow(dim, 0, length)
            for x, value in (
                (self.reference, floor_of(self.reference)),
                (self.numerator, 0.0),
                (self.denominator, 0.0),
            )
        )
        return Sums(reference, numerator, denominator)

    def running(self) -> "Sums":
        """The sums of each row and all before it, in a time that grows with the rows.

        A row sees nothing after it, so no later exponent makes an earlier sum vanish.
        """
        length = self.numerator.shape[-2]
        if length <= _STEPS:
            return self._scan()
        missing = -length % _STEPS
        filled = Sums(
            F.pad(self.reference, (0, 0, 0, missing), value=floor_of(self.reference)),
            F.pad(self.numerator, (0, 0, 0, missing)),
            F.pad(self.denominator, (0, 0, 0, missing)),
        )
        within = filled.each(lambda x: x.unflatten(-2, (-1, _STEPS)))._scan()
        before = within.each(lambda x: x[..., -1, :]).running().shifted(1, -2)
        sums = within.plus(before.each(lambda x: x[..., None, :]))
        return sums.each(lambda x: x.flatten(-3, -2)[..., :length, :])

    def _scan(self) -> "Sums":
        """`running`, one row after the other."""
        reference = self.reference.cummax(dim=-2).values
        own = self.scaled((self.reference - reference).exp())
        decay = (reference[..., :-1, :] - reference[..., 1:, :]).exp()

        def accumulate(terms: Tensor) -> Tensor:
            first, *others = terms.unbind(dim=-2)
            sums = [first]
            for term, factor in zip(others, decay.unbind(dim=-2), strict=True):
                sums.append(torch.addcmul(term, sums[-1], factor))
            return torch.stack(sums, dim=-2)

        return Sums(reference, accumulate(own.numerator), accumulate(own.denominator))

    def mean(self) -> Tensor:
        """The weighted mean; 0 where there is no weight."""
        # A little above the smallest number, gradients would not be finite (`inverse_of_weight`).
        has_none = self.denominator <= torch.finfo(self.denominator.dtype).tiny * 2**27
        return self.numerator / self.denominator.masked_fill(has_none, torch.inf)


def triangle(exponents: Tensor, values: Tensor, weights: Tensor) -> Sums:
    """Row i's sums over j ≤ i of weights_ij e^(x_j), in blocks of a power of two of rows.

    Rows of the second half see all keys of the first: there a product with one reference, the
    largest exponent of that half, loses nothing that matters to any of them. The two triangles that
    remain are smaller ones. One reference for the whole block would lose a row whose own keys are
    far below a later one.

    Args:
        exponents: x, (..., rows, channels or 1).
        values: (..., rows, channels).
        weights: (..., rows, rows); those above the diagonal are not used.
    """
    size = exponents.shape[-2]
    if size == 1:
        return Sums.terms(exponents, values).scaled(weights)
    halves = (2, size // 2)
    x, v = exponents.unflatten(-2, halves), values.unflatten(-2, halves)
    quarters = weights.unflatten(-1, halves).unflatten(-3, halves)
    inner = quarters.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    sums = triangle(x, v, inner)
    first, second = (sums.each(lambda x, half=half: x[..., half, :, :]) for half in (0, 1))
    before = Sums.terms(x[..., 0, :, :], v[..., 0, :, :]).mixed(quarters[..., 1, :, 0, :])
    second = second.plus(before)
    return Sums(
        torch.cat([first.reference, second.reference], dim=-2),
        torch.cat([first.numerator, second.numerator], dim=-2),
        torch.cat([first.denominator, second.denominator], dim=-2),
    )
