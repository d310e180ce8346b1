"""Checks of weights as untrusted data: their types, sizes and values, before they are used."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from protlm.config import ModelConfig, Positions
from protlm.system.errors import InputDataError

_BLOCK = re.compile(r"blocks\.(\d+)\.")
# The formats of weights; integers and floats of 8 bits are those of quantized models.
_FORMATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Counters and keys of mechanisms.
_INTEGERS = (".hash_key", ".redraw_index")
# Numbers that may be created per weight, and for tables that are not saved.
_DRAWS_PER_WEIGHT, _TABLE = 16, 1 << 26
_NAMES = "arange empty eye full linspace ones rand randint randn randperm zeros"
_FACTORIES = {getattr(torch, name) for name in _NAMES.split()}


def check_weights(path: Path, weights: object) -> dict[str, Tensor]:
    """Returns the weights of a checkpoint if they are a dictionary of tensors."""
    if not isinstance(weights, dict) or not weights:
        raise not_usable(path, "it has no weights")
    for name, value in weights.items():
        is_plain = isinstance(name, str) and type(value) is Tensor
        if not is_plain or value.layout is not torch.strided or value.is_quantized:
            raise not_usable(path, f"{name!r:.60} is not a tensor of weights")
        # A stride of 0 lets a small file claim any size.
        if value.numel() * value.itemsize > value.untyped_storage().nbytes():
            raise not_usable(path, f"{name!r:.60} has more numbers than are stored for it")
    return weights


def check_sizes(path: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Compares the sizes in the settings with the weights, before memory is allocated."""
    num_layers = len({found[1] for name in weights if (found := _BLOCK.match(name))})
    if num_layers != config.num_layers:
        raise InputDataError(
            f"{path} has the weights of {num_layers} layers, and its settings say "
            f"{config.num_layers}; get both again from one place"
        )
    embedding = weights.get("embedding.weight", torch.empty(0))
    if embedding.ndim == 2 and embedding.shape[1] != config.model_dim:
        raise InputDataError(
            f"{path} has weights of width {embedding.shape[1]}, and its settings say "
            f"{config.model_dim}; get both again from one place"
        )
    if config.model_dim % config.num_heads:
        raise InputDataError(
            f"{path} has settings of {config.num_heads} heads, which do not divide its width, "
            f"{config.model_dim}; get it again"
        )
    has_table = config.positions is not Positions.rotary
    if has_table and config.max_length * config.model_dim > _limit(weights):
        raise _misfit(path, f"model.max_length={config.max_length} needs too much memory")


def _limit(weights: Mapping[str, Tensor]) -> int:
    return _DRAWS_PER_WEIGHT * sum(value.numel() for value in weights.values()) + _TABLE


class LimitedMemory(TorchFunctionMode):
    """A context that limits the memory of a model under construction by the size of its weights.

    Any option of a mechanism may be a size. The limit prevents a large one from exhausting the
    memory before the shapes of the weights are compared.
    """

    def __init__(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._path, self._left = path, _limit(weights)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts the numbers of a new tensor before it is created."""
        kwargs = kwargs or {}
        if func in _FACTORIES:
            self._left -= _num_values(func, args, kwargs)
            if self._left < 0:
                raise _misfit(self._path, "a setting is far larger than the weights")
        return func(*args, **kwargs)


def _num_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Returns an upper estimate of the size of a new tensor."""
    given = [*args, *(kwargs[key] for key in ("size", "end", "steps", "n") if key in kwargs)]
    shapes = [value for value in given if isinstance(value, list | tuple)]
    if shapes:
        return math.prod(int(size) for size in shapes[0])
    numbers = [abs(int(value)) for value in given if isinstance(value, int | float)]
    if func in (torch.arange, torch.linspace):
        return max(numbers, default=0)
    return math.prod(numbers)


def check_numbers(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Rejects weights that are NaN or infinite, and types that loading would convert silently."""
    for name, value in weights.items():
        allowed = (torch.int64,) if name.endswith(_INTEGERS) else _FORMATS
        if value.dtype not in allowed:
            typed = " or ".join(str(one).removeprefix("torch.") for one in allowed)
            raise InputDataError(
                f"{path} has {name!r:.90} as {value.dtype}: quantized models are not supported; "
                f"give one in {typed}"
            )
        if not value.isfinite().all():
            raise InputDataError(
                f"{path} has NaN or infinite numbers in {name!r:.90}: its training diverged, or "
                "the file is damaged; give an earlier checkpoint, or get it again"
            )


def not_usable(path: Path, reason: str) -> InputDataError:
    """Returns the error for a file that is not a model, or not one of this version."""
    return InputDataError(f"{path} is not a model that this protlm can use: {reason}")


def _misfit(path: Path, reason: str) -> InputDataError:
    return InputDataError(f"{path} does not fit its own description: {reason}")
