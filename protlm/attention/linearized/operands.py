"""The operands of linear attention, cast to float32 a tile at a time."""

import torch
from torch import Tensor

from protlm.attention.ops.numerics import accum_dtype
from protlm.attention.ops.products import operand_dtype
from protlm.attention.ops.tiles import Tile


class Operands:
    """Queries, keys and values with their mask.

    Its methods return contiguous tensors in float32 (float64 for float64 queries), 0 at padding.
    """

    def __init__(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor) -> None:
        assert mask_BL.dtype == torch.bool, f"the mask must be bool, not {mask_BL.dtype}"
        self._q_BHLK, self._k_BHLK, self._v_BHLC = q_BHLK, k_BHLK, v_BHLC
        self._mask_BL = mask_BL
        # On a CPU it is cheaper to look for padding than to clear it. On a GPU, looking would
        # synchronize, and under torch.compile it would break the graph.
        may_look = mask_BL.device.type == "cpu" and not torch.compiler.is_compiling()
        is_whole = may_look and bool(mask_BL.all())
        self._padding_BL = None if is_whole else ~mask_BL
        self.dtype = accum_dtype(q_BHLK)
        # Of products of features, states and values; projections are never rounded.
        self.product_dtype = operand_dtype(v_BHLC)

    @property
    def may_have_padding(self) -> bool:
        """Whether there may be padding; true where checking would be too expensive."""
        return self._padding_BL is not None

    def queries(self, tile: Tile) -> Tensor:
        """Returns the queries, BHMK for M rows."""
        return self.take(self._q_BHLK, tile)

    def keys(self, tile: Tile) -> Tensor:
        """Returns the keys, BHMK."""
        return self.take(self._k_BHLK, tile)

    def values(self, tile: Tile) -> Tensor:
        """Returns the values, BHMC."""
        return self.take(self._v_BHLC, tile)

    def values_and_ones(self, tile: Tile) -> Tensor:
        """Returns [v | 1], and [0 | 0] at padding; the column of ones yields the sum of weights."""
        return self.clear_padding(self._with_ones(tile, transposed=False), tile)

    def transposed_values_and_ones(self, tile: Tile) -> Tensor:
        """Returns [v | 1]ᵀ, contiguous, since a product over positions would copy it anyway."""
        values = self._with_ones(tile, transposed=True)
        self.clear_padding(values.mT, tile)
        return values

    def _with_ones(self, tile: Tile, *, transposed: bool) -> Tensor:
        v_BHMC = tile.of(self._v_BHLC)
        *leading, rows, width = v_BHMC.shape
        shape = (width + 1, rows) if transposed else (rows, width + 1)
        values = v_BHMC.new_empty(*leading, *shape, dtype=self.dtype)
        by_rows = values.mT if transposed else values
        # Casting and transposing in one copy is several times slower on a CPU.
        by_rows[..., :-1] = v_BHMC.to(self.dtype) if transposed else v_BHMC
        by_rows[..., -1] = 1
        return values

    def take(self, x: Tensor, tile: Tile) -> Tensor:
        """Returns the tile of any tensor of vectors."""
        x_BHMK = tile.of(x)
        if self._padding_BL is None:
            return x_BHMK.to(self.dtype).contiguous()
        copy_BHMK = x_BHMK.new_empty(x_BHMK.shape, dtype=self.dtype).copy_(x_BHMK)
        return self.clear_padding(copy_BHMK, tile)

    def is_seen(self, tile: Tile) -> Tensor:
        """Returns the mask of a tile, BM."""
        return self._mask_BL[tile.samples, tile.rows]

    def clear_padding(self, x_BHMK: Tensor, tile: Tile, *, value: float = 0) -> Tensor:
        """Sets the padding of a tile to 0 or another value, in place."""
        if self._padding_BL is None:
            return x_BHMK
        padding_BM = self._padding_BL[tile.samples, tile.rows]
        is_on_cpu = padding_BM.device.type == "cpu"
        if len(padding_BM) == 1 and is_on_cpu and not torch.compiler.is_compiling():
            # Only writes to the padding, which is a small part. A GPU would have to synchronize.
            return x_BHMK.index_fill_(2, padding_BM[0].nonzero()[:, 0], value)
        return x_BHMK.masked_fill_(padding_BM[:, None, :, None], value)


def empty_output(v_BHLC: Tensor) -> Tensor:
    """Allocates outputs with the shape, dtype and strides of the values.

    torch.compile functionalizes in-place writes, and then loses the strides.
    """
    is_plain = not torch.compiler.is_compiling()
    kept = torch.preserve_format if is_plain else torch.contiguous_format
    return torch.empty_like(v_BHLC, memory_format=kept)
