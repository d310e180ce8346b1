"""Memory of a forward pass, measured on short sequences and extrapolated to long ones."""

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protlm.model.pretrained import PretrainedModel
from protlm.system.memory import free_memory, readable_size

# Windows, tiles and buckets are not all in use at shorter lengths.
_LONGEST = 2048
# Twice as many residues need at most this many times the memory where it grows in proportion.
_LINEAR = 2.2


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that are created inside the context and still in use.

    `peak` is the highest number. Memory that a kernel allocates internally is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        known = {_pointer(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _pointer(leaf) not in known | self._sizes.keys():
                self._add(leaf)
        self.peak = max(self.peak, self._bytes)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        pointer, size = storage.data_ptr(), storage.nbytes()
        self._sizes[pointer] = size
        self._bytes += size
        weakref.finalize(storage, self._free, pointer)

    def _free(self, pointer: int) -> None:
        self._bytes -= self._sizes.pop(pointer, 0)


def _pointer(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@final
@dataclass(frozen=True)
class Room:
    """Whether the computation of one protein fits into the free memory of the model's device.

    Attributes:
        per_pair: bytes for each pair of residues, beside those of the model.
        scale: times the memory of a forward pass in the type of the weights.
        training: the activations of all layers are kept for the gradient.
        short: a length that fits, since its estimate would take longer than its computation.
    """

    model: PretrainedModel
    per_pair: int = 0
    scale: int = 1
    training: bool = False
    short: int = _LONGEST

    def needs(self, length: int) -> int:
        """Returns the bytes that a protein needs in one pass, without the weights."""
        in_one_pass = min(length, self.model.max_residues or length)
        forward = self.scale * extrapolate(self._points, in_one_pass)
        return round(forward) + self.per_pair * length**2

    def refusal(self, length: int) -> str | None:
        """Returns why a protein is left out, with the needed and the free bytes, or None."""
        if length <= self.short:
            return None
        needed, free = self.needs(length), free_memory(self.model.device)
        if needed <= free:
            return None
        sizes = f"about {readable_size(needed)} of memory, and {readable_size(free)} are free"
        return f"{length:,} residues need {sizes} on {self.model.device}"

    def reason(self, length: int) -> str:
        return (
            self.refusal(length) or f"{length:,} residues do not fit into the memory of the device"
        )

    @cached_property
    def _points(self) -> dict[int, int]:
        """The peaks of two short proteins, and of a third if they grow faster than the length."""
        model, training = self.model, self.training
        longest = min(_LONGEST, model.max_residues or _LONGEST)
        lengths = {longest, max(longest // 2, 1)}
        # A context of relatives is read once, before the first protein.
        _peak(model, 1, training=training)
        points = {n: _peak(model, n, training=training) for n in lengths}
        if longest >= 4 and points[longest] > _LINEAR * points[longest // 2]:
            points[longest // 4] = _peak(model, longest // 4, training=training)
        return points


def extrapolate(points: Mapping[int, int], length: int) -> float:
    """Returns the value at a length of the polynomial through all points (Lagrange's formula)."""
    value = 0.0
    for n, peak in points.items():
        others = [other for other in points if other != n]
        value += peak * math.prod((length - other) / (n - other) for other in others)
    return value


def _peak(model: PretrainedModel, length: int, *, training: bool = False) -> int:
    batch = model.tokenize(["A" * length])
    with TensorMemory() as memory, torch.inference_mode(not training):
        model.network(
            batch.tokens_BL, batch.mask_BL, causal=model.causal, layers=[model.num_layers]
        )
    return memory.peak
