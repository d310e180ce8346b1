"""Tiles: what is computed together, so that it fits into the caches of a CPU or occupies a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
# On a CPU the features of a tile stay in cache: at most a MiB of float32 per thread.
_CPU_NUMBERS, _CPU_POSITIONS = 1 << 18, 1 << 11
_GPU_NUMBERS, _GPU_POSITIONS = 1 << 26, 1 << 20


def at_once(x: Tensor, numbers: int, *, cpu: int, gpu: int) -> int:
    """Returns how many parts to compute together on the device of a tensor.

    Args:
        x: a tensor.
        numbers: the numbers of a part.
        cpu: the numbers that fit into the caches of a CPU.
        gpu: the numbers that occupy a GPU.
    """
    return max((cpu if x.device.type == "cpu" else gpu) // numbers, 1)


@dataclass(frozen=True)
class Tile:
    """A range of samples, heads and positions."""

    samples: slice
    heads: slice
    rows: slice

    def of(self, x: Tensor) -> Tensor:
        """Returns the tile of a tensor (B, H, L, width), as a view."""
        return x[self.samples, self.heads, self.rows]


def tiles(x_BHLK: Tensor, *, num_features: int, memory_divisor: int = 1) -> Iterator[list[Tile]]:
    """Yields, for each group of sequences, the tiles of its positions from left to right.

    Linear attention computes the features of one tile at a time.

    Args:
        x_BHLK: queries, keys or values.
        num_features: random features R of a position.
        memory_divisor: divides the memory that features may occupy.
    """
    batch, heads, length, _ = x_BHLK.shape
    assert length > 0
    if x_BHLK.device.type == "cpu":
        # torch.compile cannot ask for the number of threads.
        threads = 1 if torch.compiler.is_compiling() else torch.get_num_threads()
        numbers, positions = _CPU_NUMBERS * threads, _CPU_POSITIONS * threads
    else:
        numbers, positions = _GPU_NUMBERS, _GPU_POSITIONS
    positions = min(numbers // (num_features * memory_divisor), positions) // CHUNK * CHUNK
    rows = _slices(length, max(positions, CHUNK))
    head_slices = _slices(heads, max(positions // length, 1))
    for samples in _slices(batch, max(positions // (length * heads), 1)):
        for some_heads in head_slices:
            yield [Tile(samples, some_heads, some_rows) for some_rows in rows]


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
