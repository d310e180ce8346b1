"""Running sums over chunks: the states of causal linear attention, and their gradients."""

import torch
from torch import Tensor


class States:
    """The sums of products over all chunks before each one; in reverse, over all after it.

    Attributes:
        last: the sum over all chunks so far, (B, H, C + 1, R); None stands for 0. The next tile
            overwrites it.
    """

    def __init__(self, *, reverse: bool = False) -> None:
        self.last: Tensor | None = None
        self._reverse = reverse
        self._buffer: Tensor | None = None

    def add_products(self, x: Tensor, y: Tensor) -> Tensor:
        """Goes on by a tile of S chunks, from left to right; in reverse, from right to left.

        Args:
            x: (B, H, S, C + 1, 64).
            y: (B, H, S, 64, R).

        Returns:
            (B, H, S, C + 1, R): the sum that each chunk begins with, until the next tile.
        """
        is_plain = x.device.type == "cpu" and not torch.compiler.is_compiling()
        # Tiles of several sequences are short: theirs could not be a part of one buffer.
        if is_plain and x.shape[:2] == (1, 1):
            return self._one_after_the_other(x[0, 0], y[0, 0])
        return self._cumulative(x @ y)

    def _one_after_the_other(self, x: Tensor, y: Tensor) -> Tensor:
        """For a CPU: each sum is made where its product is, in memory that all tiles use again."""
        sums = self._slots(len(x) + 1, x.shape[1], y.shape[2], like=x)
        first, *others = reversed(sums.unbind()) if self._reverse else sums.unbind()
        # Before the products, which may stand where the last sum does.
        first.copy_(torch.zeros_like(first) if self.last is None else self.last[0, 0])
        torch.bmm(x, y, out=sums[:-1] if self._reverse else sums[1:])
        for one in others:
            first = one.add_(first)
        self.last = first[None, None]
        return (sums[1:] if self._reverse else sums[:-1])[None, None]

    def _slots(self, *shape: int, like: Tensor) -> Tensor:
        if self._buffer is None or len(self._buffer) < shape[0]:
            self._buffer = like.new_empty(shape)
        return self._buffer[: shape[0]]

    def _cumulative(self, products: Tensor) -> Tensor:
        last = torch.zeros_like(products[:, :, 0]) if self.last is None else self.last
        in_order = products.flip(2) if self._reverse else products
        sums = torch.cat([last[:, :, None], in_order], dim=2).cumsum(dim=2)
        # A copy, because a view that is kept would keep the sums of all chunks.
        self.last = sums[:, :, -1].clone()
        return sums[:, :, :-1].flip(2) if self._reverse else sums[:, :, :-1].contiguous()
