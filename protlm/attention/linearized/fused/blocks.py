"""Blocks of rows of tensors, for Triton kernels; what lies outside a tensor is 0 and never read."""

# The sizes S are a `Sizes` within kernels.
# pyright: reportAttributeAccessIssue=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)


class Vectors(NamedTuple):
    """A tensor (B, H, L, width) and its strides."""

    pointer: Any
    strides: Any


class Sizes(NamedTuple):
    """Sizes that a kernel is compiled for.

    Attributes:
        R: random features.
        K: width of queries and keys.
        C: width of values.
        BL: positions of a block.
        BR: features of a block.
        BK: K, rounded up to a power of 2.
        BC: C, rounded up likewise.
        is_precise: whether products of float32 are three products in TF32, almost float32, or one.
            Triton 3.6 passes numbers, but no text, from a tuple on to other functions.
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
