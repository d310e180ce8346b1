"""Measures the memory of a pass through a model, tensor by tensor."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Measures the memory that operations in its context allocate for tensors.

    Attributes:
        peak: the most bytes that were alive after an operation.
        largest: the bytes of the largest tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = 0
        self._sizes: dict[StorageWeakRef, int] = {}

    @property
    def alive(self) -> int:
        """The allocated bytes."""
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        return sum(self._sizes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(storage) for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            # A view of an input allocates nothing.
            if (ref := StorageWeakRef(storage)) not in given:
                self._sizes[ref] = storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return out


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, Tensor)]


@pytest.fixture
def make_memory() -> type[Memory]:
    """Creates measurements of memory: `with make_memory() as memory: ...`, then `memory.alive`."""
    return Memory
