"""Full precision within autocast: exponentials, sums and states need that of float32."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Switches autocast off: what is computed is in the dtype of its operands."""
    return torch.autocast(x.device.type, enabled=False)


def wide_dtype(x: Tensor) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """The tensor in float32, or as it is in float64."""
    return x.to(wide_dtype(x))
