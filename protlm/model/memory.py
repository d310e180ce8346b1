"""Memory of a forward pass, measured on short sequences and extrapolated to long ones."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protlm.model.pretrained import PretrainedModel

_LENGTHS = (128, 256, 512)
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

    The peak of three short proteins is measured; a parabola through them is exact for mechanisms
    of linear and of quadratic cost.

    Args:
        model: the model.
        lengths: numbers of residues.

    Returns:
        Bytes for each length.
    """
    longest = model.max_residues
    short = [n for n in _LENGTHS if longest is None or n <= longest]
    peaks = [_peak(model, n) for n in short]
    if len(short) < 2:
        per_residue = _peak(model, longest or 1) / (longest or 1)
        return [round(per_residue * n) for n in lengths]
    polynomial = np.polynomial.Polynomial.fit(short, peaks, deg=len(short) - 1)
    return [max(round(float(polynomial(n))), 0) for n in lengths]


def _peak(model: PretrainedModel, length: int) -> int:
    batch = model.tokenize([_RESIDUE * length])
    with TensorMemory() as memory:
        model(batch, [model.num_layers])
    return memory.peak
