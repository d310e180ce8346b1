"""How far rounding may take a result from the exact one, on any processor."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Condition = TypeVar("Condition", float, Tensor)


def error_bound(dtype: torch.dtype, condition: Condition, depth: float) -> Condition:
    """The largest error that rounding in `dtype` may make: eps × condition × depth.

    Every operation changes its result by a factor 1 + δ with |δ| ≤ eps / 2. Of `depth` of them,
    one after the other, the factors are together 1 + depth · eps / 2 at most, whichever order and
    instructions a processor takes. A change of operands by a factor 1 + δ changes the result by
    condition · δ. The other half of eps is for what these first orders leave out.

    Args:
        dtype: what is rounded to.
        condition: of a sum, Σ|terms| for its absolute error, Σ|terms| / |Σ terms| for its relative
            error; of exp(x), |x|; of others, what `condition_of` measures.
        depth: the operations on the longest way to a result: n for a sum of n terms, and √n where
            n roundings go either way and the norm of many results is compared.
    """
    return torch.finfo(dtype).eps * condition * depth


def condition_of(
    function: Callable[..., Sequence[Tensor]], operands: Sequence[Tensor]
) -> list[float]:
    """For each result, how many times the relative errors of the operands are in its norm.

    Measured: every number of the float64 operands is changed by a random factor 1 + 1e-7 z, z of
    variance 1, and the results' changes are divided by 1e-7. A result that is a sum of terms which
    cancel has a large one, and so has the exponential of a large number.
    """
    assert all(x.dtype == torch.float64 for x in operands)
    generator, size = torch.Generator().manual_seed(0), 1e-7
    before, conditions = function(*operands), []
    for _ in range(3):
        noise = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in operands]
        moved = [x.detach() * (1 + size * z) for x, z in zip(operands, noise, strict=True)]
        pairs = zip(function(*moved), before, strict=True)
        conditions.append([float((y - x).norm() / x.norm()) / size for y, x in pairs])
    return [max(column) for column in zip(*conditions, strict=True)]
