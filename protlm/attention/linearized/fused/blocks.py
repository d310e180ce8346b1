"""Blocks of rows of tensors in Triton kernels, and the grids of programs that run them."""

# Functions of Triton seem never to return.
# pyright: reportGeneralTypeIssues=false

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from protlm.attention.linearized.case import is_hopper

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def whole_block(num_heads, length, BL: tl.constexpr):
    """Returns the head of a program in all samples, and the bounds of its block and its sample.

    The program has a head of all samples on axis 0, and a block of the sample on axis 1.
    """
    head = tl.program_id(0)
    begin = head // num_heads * length
    return head, begin + tl.program_id(1) * BL, begin + length


@triton.jit
def state_row(R: tl.constexpr):
    """Returns the row of the first feature in the state of a program with a block."""
    return (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * R


@triton.jit
def _pointers(x, head, num_heads, positions, columns, width):
    rows = (positions.to(tl.int64) * num_heads)[:, None] * width
    return x + head * width + rows + columns[None, :]


@triton.jit
def load_rows(
    x, head, num_heads, positions, is_seen, block_width: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    """Loads rows of a head of x, (B·L, H, width); 0 where `is_seen` is false."""
    columns = tl.arange(0, block_width)
    pointers = _pointers(x, head, num_heads, positions, columns, width)
    return tl.load(pointers, mask=is_seen[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def store_rows(
    x, head, num_heads, positions, end, block, block_width: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    """Stores rows of a head, in the dtype of the tensor."""
    columns = tl.arange(0, block_width)
    pointers = _pointers(x, head, num_heads, positions, columns, width)
    is_inside = (positions < end)[:, None] & (columns < width)[None, :]
    tl.store(pointers, block.to(x.dtype.element_ty), mask=is_inside)


@triton.jit
def load_matrix(x, start, rows, num_rows, block_width: tl.constexpr, width: tl.constexpr):
    """Loads rows of a contiguous matrix, the first of which is row `start` of x."""
    columns = tl.arange(0, block_width)
    is_inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    pointers = x + start * width + rows[:, None] * width + columns[None, :]
    return tl.load(pointers, mask=is_inside, other=0.0)


@triton.jit
def store_matrix(x, start, rows, num_rows, block, block_width: tl.constexpr, width: tl.constexpr):
    """Stores rows of a contiguous matrix, the first of which is row `start` of x."""
    columns = tl.arange(0, block_width)
    is_inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    tl.store(x + start * width + rows[:, None] * width + columns[None, :], block, mask=is_inside)


@triton.jit
def load_mask(mask, positions, end):
    """Returns which positions are inside the sample and not padding."""
    return tl.load(mask + positions, mask=positions < end, other=0) != 0


@triton.jit
def load_numbers(x, start, features, outside, R: tl.constexpr):
    """Loads numbers of features, the first of which is number `start` of x."""
    return tl.load(x + start + features, mask=features < R, other=outside)


@triton.jit
def load_shift(bias, x, head, features, R: tl.constexpr):
    """Loads c_r + x_r of a head; no feature outside has weight."""
    shift = load_numbers(bias, 0, features, float("-inf"), R)
    return shift + load_numbers(x, head.to(tl.int64) * R, features, 0.0, R)


@triton.jit
def half_square(k, K: tl.constexpr):
    """Returns |k|² log₂e / (2√K)."""
    k = k.to(tl.float32)
    return tl.sum(k * k, axis=1) * (0.5 / LN_2 / K**0.5)


@triton.jit
def project(x, w, PRECISE: tl.constexpr):
    """Returns x wᵀ."""
    return tl.dot(x.to(tl.float32), tl.trans(w), input_precision="tf32x3" if PRECISE else "tf32")


@triton.jit
def project_transposed(x, w, PRECISE: tl.constexpr):
    """Returns w xᵀ; as a transpose of `project`, it would have to be moved between threads."""
    return tl.dot(w, tl.trans(x.to(tl.float32)), input_precision="tf32x3" if PRECISE else "tf32")


@triton.jit
def project_split(x, w, PRECISE: tl.constexpr):
    """Returns x wᵀ; for bfloat16 x, with rows as sums of two bfloat16 numbers: 16 bits.

    x as an operand then takes half the registers of `project`, and products as much time.
    """
    if x.dtype == tl.bfloat16:
        high = w.to(tl.bfloat16)
        low = (w - high.to(tl.float32)).to(tl.bfloat16)
        projected = tl.dot(x, tl.trans(low)) + tl.dot(x, tl.trans(high))
    else:
        projected = project(x, w, PRECISE)
    return projected


@triton.jit
def multiply(x, y, dtype: tl.constexpr, PRECISE: tl.constexpr):
    """Returns x y for operands rounded to a dtype, summed in float32."""
    return tl.dot(x.to(dtype), y.to(dtype), input_precision="tf32x3" if PRECISE else "tf32")


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


@dataclass(frozen=True)
class Grid:
    """The programs of kernels, and the constants and numbers that all of them have.

    R random features, K the width of queries and keys, C that of values; BL positions and BR
    features of a block, BK and BC the widths rounded up to powers of 2. PRECISE is whether products
    of float32 are three products in TF32, almost float32, or one. `chunk_length` is the positions
    of a chunk of a sum, a multiple of the block. `blocks` has the sample of each block, its first
    position, and the end of the sample, if samples begin at `starts`.
    """

    heads: tuple[int, int]
    num_blocks: int
    num_chunks: int
    numbers: Mapping[str, Any]
    options: Mapping[str, int]

    @classmethod
    def of(
        cls, q_BHLK: Tensor, v_BHLC: Tensor, w_RK: Tensor, table: BlockTable, starts: Tensor | None
    ) -> Self:
        batch, heads, length, key_width = q_BHLK.shape
        num_features, width, dtype = len(w_RK), v_BHLC.shape[-1], v_BHLC.dtype
        blocks = table[dtype, max(key_width, width) <= 64]
        features = min(_rounded(num_features), blocks.features)
        num_blocks, num_chunks, packed = ceil(length / blocks.positions), 1, None
        if starts is None:
            num_programs = batch * heads * ceil(num_features / features)
            num_chunks = min(ceil(_PROGRAMS / num_programs), ceil(length / _SHORTEST_CHUNK))
        chunk_length = ceil(num_blocks / num_chunks) * blocks.positions
        if starts is not None:
            packed = _packed_blocks(starts, length, blocks.positions)
            batch, num_blocks = len(starts) - 1, len(packed)
        numbers = {
            **{"starts": starts, "blocks": packed},
            **{"num_heads": heads, "length": length, "chunk_length": chunk_length},
            **{"R": num_features, "K": key_width, "C": width},
            **{"BL": blocks.positions, "BR": features},
            **{"BK": _rounded(key_width), "BC": _rounded(width)},
            # Queries and keys in bfloat16 are exact in TF32; rows are rounded to 11 bits.
            "PRECISE": dtype != torch.bfloat16,
        }
        stages = 2 if table is FORWARD else 1
        options = {"num_warps": blocks.num_warps, "num_stages": stages}
        return cls((batch, heads), num_blocks, ceil(length / chunk_length), numbers, options)

    def over_positions(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        """Runs a program for each head and block of positions."""
        self._run(kernel, (self._heads, self.num_blocks), arguments)

    def over_chunks(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        """Runs a program for each head, block of features, and chunk of the positions."""
        blocks = ceil(self.numbers["R"] / self.numbers["BR"])
        self._run(kernel, (prod(self.heads) * blocks, self.num_chunks), arguments)

    def sums(self, like: Tensor, *, of_blocks: bool = False) -> tuple[Tensor, Tensor]:
        """Allocates S, in the dtype of a tensor, and z, in float32, of all chunks or blocks."""
        axes = (self.num_blocks, self._heads) if of_blocks else (self.num_chunks, *self.heads)
        shape = *axes, self.numbers["R"]
        return like.new_empty(*shape, self.numbers["C"]), like.new_empty(shape, dtype=torch.float32)

    @property
    def _heads(self) -> int:
        """The heads of all samples, or those of one, if blocks are numbered over all samples."""
        return prod(self.heads) if self.numbers["starts"] is None else self.heads[1]

    def _run(self, kernel: Any, programs: tuple[int, int], arguments: Mapping[str, Any]) -> None:
        values = {**self.numbers, **arguments}
        named = {name: values[name] for name in kernel.arg_names}
        wrap_triton(kernel)[programs](**named, **self.options)


def _packed_blocks(starts: Tensor, length: int, size: int) -> Tensor:
    """Returns the samples, first positions and ends of blocks, of which some are empty.

    Block n of a sample has the number starts // size + sample + n, after those of samples before.
    """
    firsts = starts[:-1] // size + torch.arange(len(starts) - 1, device=starts.device)
    numbers = torch.arange(length // size + len(starts) - 1, device=starts.device)
    samples = torch.searchsorted(firsts, numbers, right=True) - 1
    lows = starts[samples] + (numbers - firsts[samples]) * size
    return torch.stack([samples, lows, starts[samples + 1]], dim=1).int()


def _rounded(width: int) -> int:
    return max(1 << (width - 1).bit_length(), _NARROWEST)
