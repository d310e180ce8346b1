"""The normalizer, which maps the sums [N | D] = [Σ_j w_ij v_j | Σ_j w_ij] to the output."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.system.errors import OptionError


class Normalized(torch.autograd.Function):
    """`apply(sums, normalizer)` returns the output, with the gradient of the normalizer.

    That of autograd would have the square of an inverse, which overflows where weights are small.
    """

    @staticmethod
    def forward(ctx: Any, sums: Tensor, normalizer: "Denominator") -> Tensor:
        out_BHLC, saved_BHL1 = normalizer(sums)
        ctx.normalizer = normalizer
        ctx.save_for_backward(out_BHLC, saved_BHL1)
        return out_BHLC

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        return ctx.normalizer.gradient(grad_outputs[0], *ctx.saved_tensors), None


# With the type that `apply` lacks.
normalized: Callable[..., Tensor] = Normalized.apply


def denominator(floor: float | None, *, is_positive: bool) -> "Denominator":
    """Returns the normalizer with a floor, which weights that may be negative need."""
    if floor is None and not is_positive:
        raise OptionError(
            lambda at: (
                f"{at}denominator_floor=null allows division by sums of weights that may be "
                f"negative or near 0 with these features; set {at}denominator_floor=0.01"
            )
        )
    return Denominator(floor)


@final
@dataclass(frozen=True)
class Denominator:
    """The normalizer O = N / D, so that the weights of a row sum to 1; D is at least the floor.

    A floor is for weights that may be negative, whose sum D may be near 0. It is in units of
    the products φ(q)·φ(k); trigonometric features omit the factor exp(|q̂|²/2) of the query.
    """

    floor: float | None = None

    def __call__(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output, 0 for a row without weight, and 1 / D for the gradient, BHL1."""
        inverse_BHL1 = self._inverse(sums[..., -1:])
        return sums[..., :-1] * inverse_BHL1, inverse_BHL1

    def gradient(self, dout_BHLC: Tensor, out_BHLC: Tensor, saved_BHL1: Tensor) -> Tensor:
        """Returns [dO / D | -(dO·O) / D]; a denominator at the floor is a constant."""
        dsums = out_BHLC.new_empty(*out_BHLC.shape[:-1], out_BHLC.shape[-1] + 1)
        dnumerator_BHLC = dsums[..., :-1].copy_(dout_BHLC).mul_(saved_BHL1)
        ddenominator_BHL1 = -(dnumerator_BHLC * out_BHLC).sum(dim=-1, keepdim=True)
        if self.floor is not None:
            at_floor = torch.full_like(saved_BHL1, self.floor).reciprocal()
            ddenominator_BHL1 = ddenominator_BHL1 * (saved_BHL1 != at_floor)
        dsums[..., -1:] = ddenominator_BHL1
        return dsums

    def weights(self, weights_BHML: Tensor) -> Tensor:
        """Normalizes rows of weights to rows of the map."""
        return weights_BHML * self._inverse(weights_BHML.sum(dim=-1, keepdim=True))

    def _inverse(self, weight_BHL1: Tensor) -> Tensor:
        if self.floor is not None:
            return weight_BHL1.clamp(min=self.floor).reciprocal()
        return inverse_of_weight(weight_BHL1)


def inverse_of_weight(weight_BHL1: Tensor) -> Tensor:
    """Returns 1 / weight, and 0 for a row without weight, whose output is then 0 and not NaN."""
    # The inverse of the smallest normal number is finite, but its gradient summed over values and
    # positions is not. The threshold is 2²⁷ times that number, about 1e-30 in float32.
    has_none_BHL1 = weight_BHL1 <= torch.finfo(weight_BHL1.dtype).tiny * 2**27
    return weight_BHL1.masked_fill(has_none_BHL1, torch.inf).reciprocal_()
