"""Memory of a forward pass, measured on short sequences and extrapolated to long ones."""

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protlm.model.pretrained import PretrainedModel

# Windows, tiles and buckets are not all in use at shorter lengths.
_LONGEST = 2048
# Twice as many residues need at most this many times the memory where it grows in proportion.
_LINEAR = 2.2
_RESIDUE = "A"


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that are created inside the context and still in use.

    Memory that a kernel allocates internally is not seen.

    Attributes:
        peak: the highest number of bytes at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation, and counts the storages of its results that are new."""
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


def forward_bytes(model: PretrainedModel, lengths: Sequence[int]) -> list[int]:
    """Estimates the memory of embedding one protein of each length, without the weights.

    The peaks of two short proteins are measured, and a third one if memory grows faster than in
    proportion to the length.

    Args:
        model: the model.
        lengths: numbers of residues.

    Returns:
        Bytes for each length.
    """
    longest = min(_LONGEST, model.max_residues or _LONGEST)
    if longest == 1:
        return [_peak(model, 1)] * len(lengths)
    points = {n: _peak(model, n) for n in (longest // 2, longest)}
    if longest >= 4 and points[longest] > _LINEAR * points[longest // 2]:
        points[longest // 4] = _peak(model, longest // 4)
    return [round(extrapolate(points, n)) for n in lengths]


def extrapolate(points: Mapping[int, int], length: int) -> float:
    """Returns the value at a length of the polynomial through all points (Lagrange's formula)."""
    value = 0.0
    for n, peak in points.items():
        others = [other for other in points if other != n]
        value += peak * math.prod((length - other) / (n - other) for other in others)
    return value


def _peak(model: PretrainedModel, length: int) -> int:
    batch = model.tokenize([_RESIDUE * length])
    with TensorMemory() as memory:
        model(batch, [model.num_layers])
    return memory.peak
