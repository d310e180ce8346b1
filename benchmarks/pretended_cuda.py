"""Provides tensors that have a shape, but no values, and appear to be on a GPU.

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
_MOVES = (
    torch.Tensor.to,
    torch.Tensor.cuda,
    torch.Tensor.copy_,
    torch.Tensor.__getitem__,
    torch.Tensor.__setitem__,
)
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
        if func in _MOVES and _copies_from_the_host(func, args, kwargs):
            raise AssertionError(f"{func.__name__} copies values to the GPU, for which it waits")
        args = ["meta" if isinstance(x, torch.device) else x for x in args]
        kwargs = {name: "meta" if isinstance(x, torch.device) else x for name, x in kwargs.items()}
        return func(*args, **kwargs)


def _copies_from_the_host(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a method of a tensor copies from pageable memory to `DEVICE`."""
    first, others = args[0], [*args[1:], *kwargs.values()]
    if func is torch.Tensor.copy_:
        return first.is_meta and not others[0].is_meta
    if func in (torch.Tensor.to, torch.Tensor.cuda):
        goes = func is torch.Tensor.cuda or any(
            x == DEVICE or (isinstance(x, torch.Tensor) and x.is_meta) for x in others
        )
        return goes and not first.is_meta
    index = others[0] if isinstance(others[0], tuple) else (others[0],)
    return first.is_meta and any(
        isinstance(x, list) or (isinstance(x, torch.Tensor) and not x.is_meta) for x in index
    )


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
