"""Tiles, which are computed together, their chunks of 64 positions, and running sums over those."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import is_compiling

from protlm.attention.ops.blocks import to_blocks
from protlm.attention.ops.numerics import accum_dtype
from protlm.attention.ops.products import matrix_product
from protlm.bounds import Spans

CHUNK = 64
# On a CPU the features of a tile stay in cache: at most a MiB of float32 per thread.
_CPU_NUMBERS, _CPU_POSITIONS = 1 << 18, 1 << 11
_GPU_NUMBERS, _GPU_POSITIONS = 1 << 26, 1 << 20


@dataclass(frozen=True)
class Tile:
    """A range of samples, heads and positions."""

    samples: slice
    heads: slice
    rows: slice

    def of(self, x: Tensor) -> Tensor:
        return x[self.samples, self.heads, self.rows]


WHOLE = Tile(*[slice(None)] * 3)


def tiles(
    x_BHLK: Tensor, *, num_features: int, size: int = 4, spans: Spans | None = None
) -> Iterator[list[Tile]]:
    """Yields, for each group of sequences, the tiles of its positions from left to right.

    A tile's R features, of `size` bytes each, are computed together. A packed protein is a group.
    """
    batch, heads, length, _ = x_BHLK.shape
    assert length > 0
    if x_BHLK.device.type == "cpu":
        # torch.compile cannot ask for the number of threads.
        threads = 1 if torch.compiler.is_compiling() else torch.get_num_threads()
        numbers, positions = (n * threads * 4 // size for n in (_CPU_NUMBERS, _CPU_POSITIONS))
    else:
        numbers, positions = _GPU_NUMBERS, _GPU_POSITIONS
    positions = min(numbers // num_features, positions) // CHUNK * CHUNK
    for start, end in [(0, length)] if spans is None else spans.tolist():
        length = end - start
        rows = _ranges(start, end, max(positions, CHUNK))
        head_ranges = _ranges(0, heads, max(positions // length, 1))
        for samples in _ranges(0, batch, max(positions // (length * heads), 1)):
            for some_heads in head_ranges:
                yield [Tile(samples, some_heads, some_rows) for some_rows in rows]


def _ranges(first: int, last: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, last)) for start in range(first, last, size)]


def chunked(x_BHLR: Tensor) -> Tensor:
    """Splits positions into chunks, (B, H, chunks, 64, R); the last one is padded with 0."""
    return to_blocks(x_BHLR, CHUNK)


def positions(chunks: Tensor, tile: Tile) -> Tensor:
    """Inverts `chunked`."""
    return chunks.flatten(2, 3)[:, :, : tile.rows.stop - tile.rows.start]


class States:
    """Running sums of products over the chunks before each one; in reverse, over those after it.

    `last` is the sum over all chunks so far, (B, H, C + 1, R); None for 0. The next tile
    overwrites it.
    """

    def __init__(self, *, reverse: bool = False) -> None:
        self.last: Tensor | None = None
        self._reverse = reverse
        self._buffer: Tensor | None = None

    def add_products(self, x: Tensor, y: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Adds a tile of S chunks, from left to right; in reverse, from right to left.

        x is (B, H, S, C + 1, 64) and y (B, H, S, 64, R). Returns the sum at the beginning of each
        chunk, (B, H, S, C + 1, R), valid until the next tile.
        """
        is_plain = x.device.type == "cpu" and not is_compiling()
        # Tiles of several sequences are short, and do not fit the layout of the buffer.
        if is_plain and x.shape[:2] == (1, 1):
            return self._one_after_the_other(x[0, 0], y[0, 0], dtype)
        products = x @ y if dtype is None else matrix_product(x, y, dtype=dtype)
        return self._cumulative(products, is_plain=is_plain)

    def _one_after_the_other(self, x: Tensor, y: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Adds the sums to the products in place, in a buffer that tiles share; for a CPU."""
        if self._buffer is None or len(self._buffer) <= len(x):
            self._buffer = torch.empty(len(x) + 1, x.shape[1], y.shape[2], dtype=accum_dtype(x))
        sums = self._buffer[: len(x) + 1]
        first, *others = reversed(sums.unbind()) if self._reverse else sums.unbind()
        # Before the products, which may overwrite the last sum.
        first.copy_(torch.zeros_like(first) if self.last is None else self.last[0, 0])
        products = sums[:-1] if self._reverse else sums[1:]
        if dtype is None:
            torch.bmm(x, y, out=products)
        else:
            products.copy_(matrix_product(x, y, dtype=dtype))
        for one in others:
            first = one.add_(first)
        self.last = first[None, None]
        return (sums[1:] if self._reverse else sums[:-1])[None, None]

    def _cumulative(self, products: Tensor, *, is_plain: bool) -> Tensor:
        last = torch.zeros_like(products[:, :, 0]) if self.last is None else self.last
        if self._reverse:
            products = products.flip(2)
        sums = torch.cat([last[:, :, None], products], dim=2)
        if is_plain:
            # The cumulative sum of torch accumulates in float64 on a CPU: it rounds otherwise.
            for chunk in range(products.shape[2]):
                sums[:, :, chunk + 1].add_(sums[:, :, chunk])
        else:
            sums = sums.cumsum(dim=2)
        # A view would keep the sums of all chunks alive.
        self.last = sums[:, :, -1].clone()
        return sums[:, :, :-1].flip(2) if self._reverse else sums[:, :, :-1].contiguous()
