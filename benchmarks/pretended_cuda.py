"""This module provides tensors that have a shape, but no values, and appear to be on a GPU.

Code that asks for a value (`.item()`, `bool(x)`, `nonzero`, an index by a mask) makes the host wait
for a GPU, and fails here. So does code that copies values to the device, or mixes in a tensor that
was made on the CPU. torch's own fake CUDA tensors have no backward pass in a build without CUDA.
"""

from typing import Any, Self

import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)
# They read values from the memory of the host, and wait until the copy is done.
_COPIES = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
_IS_CUDA: Any = torch.Tensor.is_cuda
_apply = BackwardCFunction.apply


class _OnCuda(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__ and args[0].is_meta:
            return DEVICE
        if func == _IS_CUDA.__get__ and args[0].is_meta:
            return True
        if func in _COPIES and (kwargs.get("device") == DEVICE or func is torch.Tensor.new_tensor):
            raise AssertionError(f"{func.__name__} copies values to the GPU, for which it waits")
        args = ["meta" if isinstance(x, torch.device) else x for x in args]
        kwargs = {name: "meta" if isinstance(x, torch.device) else x for name, x in kwargs.items()}
        return func(*args, **kwargs)


class PretendedCuda(_OnCuda):
    """Tensors on the meta device appear to be on `DEVICE` while this mode is active."""

    def __enter__(self) -> Self:
        BackwardCFunction.apply = _apply_on_cuda
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        BackwardCFunction.apply = _apply
        super().__exit__(*error)


def _apply_on_cuda(self: Any, *gradients: Any) -> Any:
    """Runs the backward pass of a function in the mode, which autograd does not keep."""
    with _OnCuda():
        return _apply(self, *gradients)
