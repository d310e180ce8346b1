"""Pooled vectors are those of each protein, in a number of operations that does not grow."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from protlm.model.pooling import pool
from protlm.options.embed import Pooling

LENGTHS = [5, 9, 1, 7]
RANGES = [[(1, 5), (2, 3)], [], [(1, 1)], [(7, 7), (1, 6), (1, 7)]]


def rows_of(hidden_LD: Tensor, length: int, pooling: Pooling, ranges: Any) -> Tensor:
    residues_LD = hidden_LD[1 : length + 1]
    if pooling is Pooling.ranges and not ranges:
        return hidden_LD[:0]
    rows = {
        Pooling.mean: lambda: residues_LD.mean(0)[None],
        Pooling.max: lambda: residues_LD.amax(0)[None],
        Pooling.std: lambda: residues_LD.std(0, correction=0)[None],
        Pooling.per_tok: lambda: residues_LD,
        Pooling.features: lambda: residues_LD,
        Pooling.ranges: lambda: torch.stack([residues_LD[a - 1 : b].mean(0) for a, b in ranges]),
    }
    return rows.get(pooling, lambda: hidden_LD[:1])()


class Calls(TorchDispatchMode):
    """Counts operations: on a GPU, each is a launch."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("pooling", Pooling)
def test_vectors_of_a_batch_are_those_of_each_protein(pooling, dtype):
    hidden_BLD = torch.randn(4, 11, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = pool(hidden_BLD, LENGTHS, pooling, RANGES)
    given = zip(hidden_BLD.double(), LENGTHS, RANGES, strict=True)
    expected = [rows_of(row, n, pooling, own) for row, n, own in given]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.cat(expected), rtol=1e-6, atol=1e-6)
    numbers = []
    for size in (2, 4):
        with Calls() as calls:
            pool(hidden_BLD[:size], LENGTHS[:size], pooling, RANGES[:size])
        numbers.append(calls.number)
    assert numbers[0] == numbers[1]
    assert pool(hidden_BLD[1:2], [9], Pooling.ranges, [[]]).shape == (0, 3)
