"""Running sums over chunks: the states of causal linear attention, and their gradients.

A sum may be multiplied from chunk to chunk by a factor per feature. Sums without factors and sums
with factors of 1 are bitwise equal.
"""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from protlm.attention.ops.products import matrix_product


class States:
    """Running sums of products over the chunks before each one; in reverse, over those after it.

    Attributes:
        last: the sum over all chunks so far, (B, H, C + 1, R); None for 0. The next tile
            overwrites it.
    """

    def __init__(self, *, reverse: bool = False) -> None:
        self.last: Tensor | None = None
        self._reverse = reverse
        self._buffer: Tensor | None = None

    def add_products(
        self,
        x: Tensor,
        y: Tensor,
        factors: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Adds a tile of S chunks, from left to right; in reverse, from right to left.

        Args:
            x: (B, H, S, C + 1, 64).
            y: (B, H, S, 64, R).
            factors: (B, H, S, 1, R): multiply the sum at the end of a chunk, before its product is
                added; in reverse, at its beginning. None for 1.
            dtype: what operands are rounded to, as in `products.product`.

        Returns:
            (B, H, S, C + 1, R): the sum at the beginning of each chunk, valid until the next tile.
        """
        is_plain = x.device.type == "cpu" and not is_compiling()
        # Tiles of several sequences are short, and do not fit the layout of the buffer.
        if is_plain and dtype is None and x.shape[:2] == (1, 1):
            return self._one_after_the_other(x[0, 0], y[0, 0], factors)
        products = x @ y if dtype is None else matrix_product(x, y, dtype=dtype)
        return self._cumulative(products, factors)

    def _one_after_the_other(self, x: Tensor, y: Tensor, factors: Tensor | None) -> Tensor:
        """Adds the sums to the products in place, in a buffer that tiles share; for a CPU."""
        sums = self._slots(len(x) + 1, x.shape[1], y.shape[2], like=x)
        first, *others = reversed(sums.unbind()) if self._reverse else sums.unbind()
        # Before the products, which may overwrite the last sum.
        first.copy_(torch.zeros_like(first) if self.last is None else self.last[0, 0])
        torch.bmm(x, y, out=sums[:-1] if self._reverse else sums[1:])
        for number, one in enumerate(others):
            if factors is None:
                first = one.add_(first)
            else:
                chunk = len(x) - 1 - number if self._reverse else number
                first = one.addcmul_(first, factors[0, 0, chunk])
        self.last = first[None, None]
        return (sums[1:] if self._reverse else sums[:-1])[None, None]

    def _slots(self, *shape: int, like: Tensor) -> Tensor:
        if self._buffer is None or len(self._buffer) < shape[0]:
            self._buffer = like.new_empty(shape)
        return self._buffer[: shape[0]]

    def _cumulative(self, products: Tensor, factors: Tensor | None) -> Tensor:
        last = torch.zeros_like(products[:, :, 0]) if self.last is None else self.last
        if self._reverse:
            products = products.flip(2)
            factors = None if factors is None else factors.flip(2)
        sums = _SCAN(products, factors, last) if is_compiling() else _scan(products, factors, last)
        # A view would keep the sums of all chunks alive.
        self.last = sums[:, :, -1].clone()
        return sums[:, :, :-1].flip(2) if self._reverse else sums[:, :, :-1].contiguous()


def _scan(products: Tensor, factors: Tensor | None, first: Tensor) -> Tensor:
    """Computes x_0 = first, x_{s+1} = factor_s x_s + product_s: one more than the chunks."""
    joined = torch.cat([first[:, :, None], products], dim=2)
    if products.is_cuda and (factors is None or bool(factors.eq(1).all())):
        return joined.cumsum(dim=2)
    # The cumulative sum of torch accumulates in float64 on a CPU, and would be rounded differently.
    for chunk in range(products.shape[2]):
        before, after = joined[:, :, chunk], joined[:, :, chunk + 1]
        if factors is None:
            after.add_(before)
        else:
            after.addcmul_(before, factors[:, :, chunk])
    return joined


# One operator for the compiler of torch, instead of a loop over chunks that depends on the factors.
_SCAN = torch.library.custom_op("protlm::scan_states", _scan, mutates_args=())


@_SCAN.register_fake
def _(products: Tensor, factors: Tensor | None, first: Tensor) -> Tensor:
    return torch.cat([first[:, :, None], products], dim=2)
