"""How linear attention cuts its work: features exist for one tile of positions at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
# Features of a tile stay in cache: at most a MiB of float32 for each thread of a CPU.
_CPU_NUMBERS, _CPU_POSITIONS = 1 << 18, 1 << 11
_GPU_NUMBERS, _GPU_POSITIONS = 1 << 26, 1 << 20


@dataclass(frozen=True)
class Tile:
    """Some heads of some samples, at some positions."""

    samples: slice
    heads: slice
    rows: slice

    def of(self, x: Tensor) -> Tensor:
        """The tile of a tensor (B, H, L, width), as a view."""
        return x[self.samples, self.heads, self.rows]


def tiles(x_BHLK: Tensor, *, num_features: int, share: int = 1) -> Iterator[list[Tile]]:
    """Yields, for each group of sequences, the tiles of its positions from left to right.

    Args:
        x_BHLK: queries, keys or values.
        num_features: random features R of a position.
        share: one share of how many of the memory that features may take.
    """
    batch, heads, length, _ = x_BHLK.shape
    assert length > 0
    if x_BHLK.device.type == "cpu":
        # torch.compile cannot ask for the number of threads.
        threads = 1 if torch.compiler.is_compiling() else torch.get_num_threads()
        numbers, positions = _CPU_NUMBERS * threads, _CPU_POSITIONS * threads
    else:
        numbers, positions = _GPU_NUMBERS, _GPU_POSITIONS
    positions = min(numbers // (num_features * share), positions) // CHUNK * CHUNK
    rows = _slices(length, max(positions, CHUNK))
    head_slices = _slices(heads, max(positions // length, 1))
    for samples in _slices(batch, max(positions // (length * heads), 1)):
        for some_heads in head_slices:
            yield [Tile(samples, some_heads, some_rows) for some_rows in rows]


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
