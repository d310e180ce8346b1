"""What turns the sums [N | D] = [Σ_j w_ij v_j | Σ_j w_ij] of linear attention into its output."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import final

import torch
from torch import Tensor

from protlm.errors import UserError, refuse_unknown


class Normalizer(ABC):
    """Takes sums, (B, H, L, C + 1), to outputs that no factor of a row of weights can change."""

    @abstractmethod
    def __call__(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output, BHLC, and what the gradient needs of each row, BHL1.

        A row without weight is 0, never NaN.
        """

    @abstractmethod
    def gradient(self, dout_BHLC: Tensor, out_BHLC: Tensor, saved_BHL1: Tensor) -> Tensor:
        """Returns the gradient of the sums, (B, H, L, C + 1)."""

    @abstractmethod
    def weights(self, weights_BHML: Tensor) -> Tensor:
        """Returns the rows of the map, from rows of weights."""


class Normalization(StrEnum):
    """The normalisers, by name."""

    denominator = "denominator"
    rmsnorm = "rmsnorm"


def normalizer_of(name: str, *, floor: float | None, is_positive: bool) -> Normalizer:
    """The normaliser of a name.

    Args:
        name: `denominator` or `rmsnorm`.
        floor: the least denominator that is divided by; None for no floor.
        is_positive: whether no weight can be negative.

    Raises:
        UserError: an unknown name, a floor that is not above 0 or that nothing uses, or no floor
            under a denominator that may be negative.
    """
    refuse_unknown("attention.normalizer", name, Normalization)
    given = f"attention.denominator_floor={'null' if floor is None else floor}"
    if name == Normalization.rmsnorm:
        if floor is not None:
            raise UserError(f"{given} does nothing with attention.normalizer=rmsnorm; set it null")
        return RootMeanSquare()
    if floor is not None and not 0 < floor < math.inf:
        raise UserError(f"{given} must be a number above 0, or null")
    if floor is None and not is_positive:
        raise UserError(
            f"{given} leaves sums of weights unguarded that may be negative or near 0 with these "
            "features; set attention.denominator_floor=0.01, or attention.normalizer=rmsnorm"
        )
    return Denominator(floor)


@final
@dataclass(frozen=True)
class Denominator(Normalizer):
    """O = N / D, so that the weights of a row sum to 1; D is at least the floor, if there is one.

    A floor guards sums of weights that may be negative, whose D may be anywhere near 0. It is in
    units of the products φ(q)·φ(k): trigonometric ones lack the factor exp(|q̂|²/2) of the query.
    """

    floor: float | None = None

    def __call__(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """See `Normalizer`."""
        inverse_BHL1 = self._inverse(sums[..., -1:])
        return sums[..., :-1] * inverse_BHL1, inverse_BHL1

    def gradient(self, dout_BHLC: Tensor, out_BHLC: Tensor, saved_BHL1: Tensor) -> Tensor:
        """[dO / D | -(dO·O) / D]; a denominator at the floor is a constant."""
        dsums = _sums_like(out_BHLC)
        dnumerator_BHLC = dsums[..., :-1].copy_(dout_BHLC).mul_(saved_BHL1)
        ddenominator_BHL1 = -(dnumerator_BHLC * out_BHLC).sum(dim=-1, keepdim=True)
        if self.floor is not None:
            at_floor = torch.full_like(saved_BHL1, self.floor).reciprocal()
            ddenominator_BHL1 = ddenominator_BHL1 * (saved_BHL1 != at_floor)
        dsums[..., -1:] = ddenominator_BHL1
        return dsums

    def weights(self, weights_BHML: Tensor) -> Tensor:
        """See `Normalizer`."""
        return weights_BHML * self._inverse(weights_BHML.sum(dim=-1, keepdim=True))

    def _inverse(self, weight_BHL1: Tensor) -> Tensor:
        if self.floor is not None:
            return weight_BHL1.clamp(min=self.floor).reciprocal()
        return inverse_of_weight(weight_BHL1)


@final
@dataclass(frozen=True)
class RootMeanSquare(Normalizer):
    """O = N / √(mean_c N_c²): the output norm of TransNormer in place of a denominator.

    Qin et al., arXiv 2210.10340, section 3.2. There is no gain: the output projection has one.
    """

    def __call__(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """See `Normalizer`."""
        numerator_BHLC = sums[..., :-1]
        # Squares of small sums would underflow: the row's largest entry is taken out before.
        inverse_BHL1 = inverse_of_weight(numerator_BHLC.abs().amax(dim=-1, keepdim=True))
        scaled_BHLC = numerator_BHLC * inverse_BHL1
        mean_BHL1 = scaled_BHLC.square().mean(dim=-1, keepdim=True)
        root_BHL1 = mean_BHL1.masked_fill(inverse_BHL1 == 0, torch.inf).rsqrt()
        return scaled_BHLC * root_BHL1, inverse_BHL1 * root_BHL1

    def gradient(self, dout_BHLC: Tensor, out_BHLC: Tensor, saved_BHL1: Tensor) -> Tensor:
        """The gradient of N; none for D, on which the output does not depend."""
        along_BHL1 = (dout_BHLC * out_BHLC).mean(dim=-1, keepdim=True)
        dsums = _sums_like(out_BHLC)
        dsums[..., :-1] = (dout_BHLC - out_BHLC * along_BHL1) * saved_BHL1
        dsums[..., -1] = 0
        return dsums

    def weights(self, weights_BHML: Tensor) -> Tensor:
        """The size of a row depends on the values: rows have absolute weights that sum to 1."""
        return weights_BHML * inverse_of_weight(weights_BHML.abs().sum(dim=-1, keepdim=True))


@final
@dataclass(frozen=True)
class Unnormalized(Normalizer):
    """O = N, for looking at the sums themselves; no setting names it."""

    def __call__(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """See `Normalizer`."""
        return sums[..., :-1], torch.ones_like(sums[..., -1:])

    def gradient(self, dout_BHLC: Tensor, out_BHLC: Tensor, saved_BHL1: Tensor) -> Tensor:
        """The gradient of N; none for D."""
        dsums = _sums_like(out_BHLC)
        dsums[..., :-1], dsums[..., -1] = dout_BHLC, 0
        return dsums

    def weights(self, weights_BHML: Tensor) -> Tensor:
        """See `Normalizer`."""
        return weights_BHML


def _sums_like(out_BHLC: Tensor) -> Tensor:
    return out_BHLC.new_empty(*out_BHLC.shape[:-1], out_BHLC.shape[-1] + 1)


def inverse_of_weight(weight_BHL1: Tensor) -> Tensor:
    """1 / weight, and 0 for a row without weight: its output is then 0, not NaN."""
    # At the smallest normal number the inverse is finite, but its gradient summed over values and
    # positions would not be; 2²⁷ above, about 1e-30 in float32, leaves room for both.
    has_none_BHL1 = weight_BHL1 <= torch.finfo(weight_BHL1.dtype).tiny * 2**27
    return weight_BHL1.masked_fill(has_none_BHL1, torch.inf).reciprocal_()
