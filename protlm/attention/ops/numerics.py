"""Float32 within autocast: exponentials, sums and states need its precision."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Disables autocast, so that results have the dtype of their operands."""
    return torch.autocast(x.device.type, enabled=False)


def accum_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype to accumulate in: float32, or float64 for a float64 tensor."""
    return torch.promote_types(x.dtype, torch.float32)


def upcast(x: Tensor) -> Tensor:
    """Casts a tensor to float32; a float64 tensor is returned unchanged."""
    return x.to(accum_dtype(x))
