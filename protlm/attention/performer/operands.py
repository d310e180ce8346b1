"""The operands of linear attention, taken a tile at a time in full precision."""

from dataclasses import dataclass

import torch
from torch import Tensor

from protlm.attention.performer.features import FeatureMap
from protlm.attention.performer.normalization import Normalizer
from protlm.attention.performer.tiles import Tile


@dataclass(frozen=True)
class Kernel:
    """What linear attention computes with: R features of a map, and a normaliser.

    The projection is here to be saved for the backward pass: a redraw before it is then an error
    (but under activation checkpointing, where the recomputation would use the new rows).
    """

    feature_map: FeatureMap
    normalizer: Normalizer
    num_features: int
    projection_RK: Tensor | None


class Operands:
    """Queries, keys and values with their mask.

    What it returns is contiguous, in float32 (float64 for float64 queries), and 0 at padding.
    """

    def __init__(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor) -> None:
        assert mask_BL.dtype == torch.bool, f"a mask is of bool, not of {mask_BL.dtype}"
        self._q_BHLK, self._k_BHLK, self._v_BHLC = q_BHLK, k_BHLK, v_BHLC
        # On a CPU it costs nothing to see that there is no padding, and more to clear none; on a
        # GPU it would wait for the device, and under torch.compile cut the graph.
        may_look = mask_BL.device.type == "cpu" and not torch.compiler.is_compiling()
        is_whole = may_look and bool(mask_BL.all())
        self._padding_BL = None if is_whole else ~mask_BL
        self.dtype = torch.promote_types(q_BHLK.dtype, torch.float32)

    def queries(self, tile: Tile) -> Tensor:
        """The queries, BHMK for M rows."""
        return self.take(self._q_BHLK, tile)

    def keys(self, tile: Tile) -> Tensor:
        """The keys, BHMK."""
        return self.take(self._k_BHLK, tile)

    def values(self, tile: Tile) -> Tensor:
        """The values, BHMC."""
        return self.take(self._v_BHLC, tile)

    def values_and_ones(self, tile: Tile) -> Tensor:
        """[v | 1], and [0 | 0] at padding: a column of ones makes the sum of the weights."""
        return self.clear_padding(self._beside_ones(tile, transposed=False), tile)

    def transposed_values_and_ones(self, tile: Tile) -> Tensor:
        """[v | 1]ᵀ, contiguous: the copy that a product over positions would make anyway."""
        values = self._beside_ones(tile, transposed=True)
        self.clear_padding(values.mT, tile)
        return values

    def _beside_ones(self, tile: Tile, *, transposed: bool) -> Tensor:
        v_BHMC = tile.of(self._v_BHLC)
        *leading, rows, width = v_BHMC.shape
        shape = (width + 1, rows) if transposed else (rows, width + 1)
        values = v_BHMC.new_empty(*leading, *shape, dtype=self.dtype)
        by_rows = values.mT if transposed else values
        # To cast and to transpose at once takes a CPU several times as long.
        by_rows[..., :-1] = v_BHMC.to(self.dtype) if transposed else v_BHMC
        by_rows[..., -1] = 1
        return values

    def take(self, x: Tensor, tile: Tile) -> Tensor:
        """The tile of any tensor of vectors."""
        x_BHMK = tile.of(x)
        if self._padding_BL is None:
            return x_BHMK.to(self.dtype).contiguous()
        copy_BHMK = x_BHMK.new_empty(x_BHMK.shape, dtype=self.dtype).copy_(x_BHMK)
        return self.clear_padding(copy_BHMK, tile)

    def clear_padding(self, x_BHMK: Tensor, tile: Tile) -> Tensor:
        """Sets what a tile holds at padding to 0, in place."""
        if self._padding_BL is None:
            return x_BHMK
        padding_BM = self._padding_BL[tile.samples, tile.rows]
        is_on_cpu = padding_BM.device.type == "cpu"
        if len(padding_BM) == 1 and is_on_cpu and not torch.compiler.is_compiling():
            # Padding is a small part: this touches only that part. A GPU would have to wait.
            return x_BHMK.index_fill_(2, padding_BM[0].nonzero()[:, 0], 0)
        return x_BHMK.masked_fill_(padding_BM[:, None, :, None], 0)


def empty_output(v_BHLC: Tensor) -> Tensor:
    """Where outputs are written tile by tile: of the shape, dtype and strides of the values.

    torch.compile makes new tensors of what is written in place, and then loses their strides.
    """
    is_plain = not torch.compiler.is_compiling()
    kept = torch.preserve_format if is_plain else torch.contiguous_format
    return torch.empty_like(v_BHLC, memory_format=kept)
