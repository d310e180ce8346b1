"""Tiles change no result, and memory grows with the length, never with its square."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import attention_free, long_short, reformer
from protlm.attention.linearized import tiles
from protlm.attention.ops import block_sparse

# The numbers that are computed together on a CPU, by module.
TILES = [(module, "_CPU_NUMBERS") for module in (attention_free, long_short, reformer)]
TILES += [(block_sparse, "_CPU_ELEMENTS")]
# Numbers that are kept for the backward pass, by those of q, k, v and the output: most keep these
# and a few states; copies of keys in blocks, weights of windows and float32 add to it.
KEPT = {"aft_conv": 4.0, "aft_local": 9.0, "hybrid": 6.0, "longformer": 5.5, "long_short": 9.0}


def set_tiles(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    for module, name in TILES:
        monkeypatch.setattr(module, name, numbers)


@contextmanager
def kept() -> Iterator[dict[int, int]]:
    """Records the sizes of the storages that are kept for a backward pass."""
    sizes: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 4
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield sizes


def test_memory_grows_with_the_length_only(
    case: Any, causal: bool, largest_tensor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tiles(monkeypatch, 1 << 13)
    largest, stored = [], []
    for length in (1024, 2048):
        mechanism = case.create(max_length=length)
        leaves = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
        hidden_BLD = torch.randn(1, length, 16, requires_grad=True)
        rest = {"mask_BL": torch.arange(length)[None] < length - 7, "causal": causal}
        largest_tensor.numel = 0
        with largest_tensor, kept() as sizes:
            out = mechanism(*leaves, hidden_BLD=hidden_BLD, **rest)
        with largest_tensor:
            out.square().sum().backward()
        largest.append(largest_tensor.numel)
        tables = {x.untyped_storage().data_ptr() for x in mechanism.parameters()}
        stored.append(sum(size for pointer, size in sizes.items() if pointer not in tables))
    assert largest[1] <= 2.2 * largest[0]
    assert largest[1] < 2048**2 / 4
    assert stored[1] <= 2.2 * stored[0]
    assert stored[1] <= KEPT.get(case.name, 3.0) * 4 * leaves[0].numel()


def test_tiles_make_no_difference(
    case: Any, causal: bool, make_inputs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism = case.create().double()
    results = []
    for numbers in (1, 10_000, 1 << 20):
        set_tiles(monkeypatch, numbers)
        monkeypatch.setattr(tiles, "_CPU_NUMBERS", numbers)
        inputs = make_inputs(130).differentiable()
        out = inputs.run(mechanism, causal=causal)
        leaves = [*inputs[:4], *mechanism.parameters()]
        found = torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)
        results.append([out, *found])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-10, atol=1e-10)
