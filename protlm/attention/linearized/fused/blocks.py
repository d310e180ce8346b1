"""Blocks of rows of tensors in Triton kernels, and the grids of programs that run them."""

# The sizes S are a `Sizes` within kernels.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from protlm.attention.linearized.selection import is_hopper

LN_2 = tl.constexpr(0.6931471805599453)


class Vectors(NamedTuple):
    """A tensor (B, H, L, width) and its strides."""

    pointer: Any
    strides: Any


class Sizes(NamedTuple):
    """Sizes that a kernel is compiled for.

    R random features, K the width of queries and keys, C that of values; BL positions and BR
    features of a block, BK and BC the widths rounded up to powers of 2. `is_precise` is whether
    products of float32 are three products in TF32, almost float32, or one: Triton 3.6 passes
    numbers, but no text, from a tuple on to other functions.
    """

    R: int
    K: int
    C: int
    BL: int
    BR: int
    BK: int
    BC: int
    is_precise: bool


@triton.jit
def _pointers(x, head, num_heads, positions, columns):
    sample, head = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
    start = x.pointer + sample * x.strides[0] + head * x.strides[1]
    rows = positions.to(tl.int64)[:, None] * x.strides[2]
    return start + rows + columns[None, :] * x.strides[3]


@triton.jit
def load_rows(x, head, num_heads, positions, is_seen, block_width: tl.constexpr, width):
    """Loads rows of a head, numbered over all samples; 0 where `is_seen` is false."""
    columns = tl.arange(0, block_width)
    pointers = _pointers(x, head, num_heads, positions, columns)
    return tl.load(pointers, mask=is_seen[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def store_rows(x, head, num_heads, positions, length, block_width: tl.constexpr, width, block):
    """Stores rows of a head, in the dtype of the tensor."""
    columns = tl.arange(0, block_width)
    pointers = _pointers(x, head, num_heads, positions, columns)
    is_inside = (positions < length)[:, None] & (columns < width)[None, :]
    tl.store(pointers, block.to(x.pointer.dtype.element_ty), mask=is_inside)


@triton.jit
def load_matrix(x, start, rows, num_rows, block_width: tl.constexpr, width):
    """Loads rows of a contiguous matrix, the first of which is row `start` of x."""
    columns = tl.arange(0, block_width)
    is_inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    pointers = x + start * width + rows[:, None] * width + columns[None, :]
    return tl.load(pointers, mask=is_inside, other=0.0)


@triton.jit
def store_matrix(x, start, rows, num_rows, block_width: tl.constexpr, width, block):
    """Stores rows of a contiguous matrix, the first of which is row `start` of x."""
    columns = tl.arange(0, block_width)
    is_inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    tl.store(x + start * width + rows[:, None] * width + columns[None, :], block, mask=is_inside)


@triton.jit
def load_mask(mask, head, num_heads, positions, length):
    """Returns which positions are inside the sequence and not padding."""
    start = (head // num_heads).to(tl.int64) * length
    return tl.load(mask + start + positions, mask=positions < length, other=0) != 0


@triton.jit
def load_numbers(x, start, features, outside, S: tl.constexpr):
    """Loads numbers of features, the first of which is number `start` of x."""
    return tl.load(x + start + features, mask=features < S.R, other=outside)


@triton.jit
def load_shift(bias, x, head, features, S: tl.constexpr):
    """Loads c_r + x_r of a head; no feature outside has weight."""
    shift = load_numbers(bias, 0, features, float("-inf"), S)
    return shift + load_numbers(x, head.to(tl.int64) * S.R, features, 0.0, S)


@triton.jit
def half_square(k, K: tl.constexpr):
    """Returns |k|² log₂e / (2√K)."""
    k = k.to(tl.float32)
    return tl.sum(k * k, axis=1) * (0.5 / LN_2 / K**0.5)


@triton.jit
def project(x, w, is_precise: tl.constexpr):
    """Returns x wᵀ."""
    return tl.dot(x.to(tl.float32), tl.trans(w), input_precision="tf32x3" if is_precise else "tf32")


@triton.jit
def project_transposed(x, w, is_precise: tl.constexpr):
    """Returns w xᵀ; as a transpose of `project`, it would have to be moved between threads."""
    return tl.dot(w, tl.trans(x.to(tl.float32)), input_precision="tf32x3" if is_precise else "tf32")


@triton.jit
def project_split(x, w, is_precise: tl.constexpr):
    """Returns x wᵀ; for bfloat16 x, with rows as sums of two bfloat16 numbers: 16 bits.

    x as an operand then takes half the registers of `project`, and products as much time.
    """
    if x.dtype == tl.bfloat16:
        high = w.to(tl.bfloat16)
        low = (w - high.to(tl.float32)).to(tl.bfloat16)
        projected = tl.dot(x, tl.trans(low)) + tl.dot(x, tl.trans(high))
    else:
        projected = project(x, w, is_precise)
    return projected


@triton.jit
def multiply(x, y, dtype: tl.constexpr, is_precise: tl.constexpr):
    """Returns x y for operands rounded to a dtype, summed in float32."""
    return tl.dot(x.to(dtype), y.to(dtype), input_precision="tf32x3" if is_precise else "tf32")


# Sums over positions are split until there are this many programs, about two for each
# multiprocessor of the largest cards, unless chunks would become shorter than this.
_PROGRAMS, _SHORTEST_CHUNK = 264, 256
_NARROWEST = 16


class BlockSizes(NamedTuple):
    """Positions and features of a block, and warps of a program; larger ones spill registers."""

    positions: int
    features: int
    num_warps: int


# By the dtype of the values, and whether K and C are at most 64.
BlockTable = Mapping[tuple[torch.dtype, bool], BlockSizes]
FORWARD: BlockTable = {
    (torch.bfloat16, True): BlockSizes(64, 64, 4),
    (torch.bfloat16, False): BlockSizes(64, 32, 8),
    (torch.float32, True): BlockSizes(32, 32, 4),
}
GRADIENTS: BlockTable = {
    (torch.bfloat16, True): BlockSizes(64, 32, 4),
    (torch.bfloat16, False): BlockSizes(32, 32, 8),
    (torch.float32, True): BlockSizes(32, 32, 8),
}
# They hold the most in registers: k, v, dk and dv.
KEY_GRADIENTS: BlockTable = GRADIENTS | {(torch.bfloat16, True): BlockSizes(32, 32, 4)}
# States are stored for every block of positions: shorter blocks take more memory.
CAUSAL: BlockTable = {
    (torch.bfloat16, True): BlockSizes(64, 32, 4),
    (torch.float32, True): BlockSizes(32, 16, 4),
}
CAUSAL_GRADIENTS: BlockTable = CAUSAL | {(torch.bfloat16, True): BlockSizes(64, 16, 4)}
# Triton's assembler errs in narrow blocks for compute capability 9.0; wide ones spill on others.
_HOPPER_CAUSAL_GRADIENTS = CAUSAL | {(torch.bfloat16, True): BlockSizes(64, 64, 4)}


def causal_blocks(device: torch.device) -> BlockTable:
    """Returns the blocks of causal gradients on a card."""
    return _HOPPER_CAUSAL_GRADIENTS if is_hopper(device) else CAUSAL_GRADIENTS


def vectors(x_BHLK: Tensor) -> Vectors:
    """Returns the tensor with its strides."""
    return Vectors(x_BHLK, x_BHLK.stride())


@dataclass(frozen=True)
class Grid:
    """The programs of the kernels, and the arguments that all of them have.

    `shape` is (B, H, L); `sizes` are `Sizes`, which kernels declare as constants of the compiler.
    `num_programs` are heads of all samples times blocks of features, and `chunk_length` is the
    positions of a chunk of a sum, a multiple of the block.
    """

    shape: tuple[int, int, int]
    sizes: Any
    num_programs: int
    chunk_length: int
    options: Mapping[str, int]

    @classmethod
    def of(cls, q_BHLK: Tensor, v_BHLC: Tensor, w_RK: Tensor, table: BlockTable) -> Self:
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
        num_chunks = min(ceil(_PROGRAMS / num_programs), ceil(length / _SHORTEST_CHUNK))
        chunk_length = ceil(ceil(length / sizes.BL) / num_chunks) * sizes.BL
        return cls(
            shape=(batch, heads, length),
            sizes=sizes,
            num_programs=num_programs,
            chunk_length=chunk_length,
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

    def over_chunks(self, kernel: Any, *arguments: Any) -> None:
        """Runs a program for each head, block of features, and chunk of the positions."""
        _, heads, length = self.shape
        kernel[self.num_programs, self._num_chunks](
            *arguments, heads, length, self.chunk_length, self.sizes, **self.options
        )

    def states_like(self, v_BHLC: Tensor) -> tuple[Tensor, Tensor]:
        """Allocates, for each block of positions, a vector of width C and a number per feature."""
        batch, heads, length = self.shape
        shape = batch, heads, ceil(length / self.sizes.BL), self.sizes.R
        return v_BHLC.new_empty(*shape, self.sizes.C), v_BHLC.new_empty(shape, dtype=torch.float32)

    def chunks_like(self, v_BHLC: Tensor) -> tuple[Tensor, Tensor]:
        """Allocates, for each chunk, a vector of width C and a number per feature, in float32."""
        shape = self._num_chunks, *self.shape[:2], self.sizes.R
        numbers = v_BHLC.new_empty(shape, dtype=torch.float32)
        return numbers.new_empty(*shape, self.sizes.C), numbers

    @property
    def _num_chunks(self) -> int:
        return ceil(self.shape[2] / self.chunk_length)


def bytes_of(mask_BL: Tensor) -> Tensor:
    """Returns the mask as bytes."""
    return mask_BL.contiguous().view(torch.uint8)


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Makes the device of a tensor the current one."""
    return torch.cuda.device_of(x)


def _rounded(width: int) -> int:
    return max(1 << (width - 1).bit_length(), _NARROWEST)
