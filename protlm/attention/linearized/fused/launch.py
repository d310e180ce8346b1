"""Sizes of blocks, and grids of programs, for the kernels of fused linear attention."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from protlm.attention.linearized.fused.blocks import Sizes, Vectors
from protlm.attention.linearized.selection import is_hopper

# Sums over positions are split until there are this many programs, about two for each
# multiprocessor of the largest cards, unless parts would become shorter than this.
_PROGRAMS, _SHORTEST_PART = 264, 256
_NARROWEST = 16


class Blocks(NamedTuple):
    """Positions and features of a block, and warps of a program; larger ones spill registers."""

    positions: int
    features: int
    num_warps: int


# By the dtype of the values, and whether K and C are at most 64.
BlockTable = Mapping[tuple[torch.dtype, bool], Blocks]
FORWARD: BlockTable = {
    (torch.bfloat16, True): Blocks(64, 64, 4),
    (torch.bfloat16, False): Blocks(64, 32, 8),
    (torch.float32, True): Blocks(32, 32, 4),
}
GRADIENTS: BlockTable = {
    (torch.bfloat16, True): Blocks(64, 32, 4),
    (torch.bfloat16, False): Blocks(32, 32, 8),
    (torch.float32, True): Blocks(32, 32, 8),
}
# They hold the most in registers: k, v, dk and dv.
KEY_GRADIENTS: BlockTable = GRADIENTS | {(torch.bfloat16, True): Blocks(32, 32, 4)}
# States are stored for every block of positions: shorter blocks take more memory.
CAUSAL: BlockTable = {
    (torch.bfloat16, True): Blocks(64, 32, 4),
    (torch.float32, True): Blocks(32, 16, 4),
}
CAUSAL_GRADIENTS: BlockTable = CAUSAL | {(torch.bfloat16, True): Blocks(64, 16, 4)}
# Triton's assembler errs in narrow blocks for compute capability 9.0; wide ones spill on others.
_HOPPER_CAUSAL_GRADIENTS = CAUSAL | {(torch.bfloat16, True): Blocks(64, 64, 4)}


def causal_blocks(device: torch.device) -> BlockTable:
    """Returns the blocks of causal gradients on a card."""
    return _HOPPER_CAUSAL_GRADIENTS if is_hopper(device) else CAUSAL_GRADIENTS


def vectors(x_BHLK: Tensor) -> Vectors:
    """Returns the tensor with its strides."""
    return Vectors(x_BHLK, x_BHLK.stride())


@dataclass(frozen=True)
class Grid:
    """The programs of the kernels, and the arguments that all of them have.

    Attributes:
        shape: batch B, heads H and length L.
        sizes: the `Sizes`, which kernels declare as constants of the compiler.
        num_programs: heads of all samples times blocks of features.
        part_length: positions of a part of a sum, a multiple of the block.
        options: for the compiler.
    """

    shape: tuple[int, int, int]
    sizes: Any
    num_programs: int
    part_length: int
    options: Mapping[str, int]

    @classmethod
    def of(cls, q_BHLK: Tensor, v_BHLC: Tensor, w_RK: Tensor, table: BlockTable) -> Self:
        """Returns the grid for queries, values and rows, with the blocks of a table."""
        batch, heads, length, key_width = q_BHLK.shape
        num_features, width, dtype = len(w_RK), v_BHLC.shape[-1], v_BHLC.dtype
        blocks = table[dtype, max(key_width, width) <= 64]
        sizes = Sizes(
            R=num_features,
            K=key_width,
            C=width,
            BL=blocks.positions,
            BR=min(_rounded(num_features), blocks.features),
            BK=_rounded(key_width),
            BC=_rounded(width),
            # Queries and keys in bfloat16 are exact in TF32; rows are rounded to 11 bits.
            is_precise=dtype != torch.bfloat16,
        )
        num_programs = batch * heads * ceil(num_features / sizes.BR)
        num_parts = min(ceil(_PROGRAMS / num_programs), ceil(length / _SHORTEST_PART))
        part_length = ceil(ceil(length / sizes.BL) / num_parts) * sizes.BL
        return cls(
            shape=(batch, heads, length),
            sizes=sizes,
            num_programs=num_programs,
            part_length=part_length,
            options={"num_warps": blocks.num_warps, "num_stages": 2 if table is FORWARD else 1},
        )

    def over_positions(self, kernel: Any, *arguments: Any) -> None:
        """Runs a program for each head and block of positions."""
        batch, heads, length = self.shape
        programs = batch * heads, ceil(length / self.sizes.BL)
        kernel[programs](*arguments, heads, length, self.sizes, **self.options)

    def over_features(self, kernel: Any, *arguments: Any) -> None:
        """Runs a program for each head and block of features."""
        _, heads, length = self.shape
        kernel[(self.num_programs,)](*arguments, heads, length, self.sizes, **self.options)

    def over_parts(self, kernel: Any, *arguments: Any) -> None:
        """Runs a program for each head, block of features, and part of the positions."""
        _, heads, length = self.shape
        kernel[self.num_programs, self._num_parts](
            *arguments, heads, length, self.part_length, self.sizes, **self.options
        )

    def states_like(self, v_BHLC: Tensor) -> tuple[Tensor, Tensor]:
        """Allocates, for each block of positions, a vector of width C and a number per feature."""
        batch, heads, length = self.shape
        shape = batch, heads, ceil(length / self.sizes.BL), self.sizes.R
        return v_BHLC.new_empty(*shape, self.sizes.C), v_BHLC.new_empty(shape, dtype=torch.float32)

    def parts_like(self, v_BHLC: Tensor) -> tuple[Tensor, Tensor]:
        """Allocates, for each part, a vector of width C and a number per feature, in float32."""
        shape = self._num_parts, *self.shape[:2], self.sizes.R
        numbers = v_BHLC.new_empty(shape, dtype=torch.float32)
        return numbers.new_empty(*shape, self.sizes.C), numbers

    @property
    def _num_parts(self) -> int:
        return ceil(self.shape[2] / self.part_length)


def bytes_of(mask_BL: Tensor) -> Tensor:
    """Returns the mask as bytes."""
    return mask_BL.contiguous().view(torch.uint8)


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Makes the device of a tensor the current one, on which kernels are launched."""
    return torch.cuda.device_of(x)


def _rounded(width: int) -> int:
    return max(1 << (width - 1).bit_length(), _NARROWEST)
