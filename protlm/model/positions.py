"""Position encodings: tables added to the embeddings, rotary angles, or biases of logits.

Sinusoids: arXiv 1706.03762, section 3.5. Rotary: arXiv 2104.09864, equation 34, in the layout that
pairs coordinate i with i + K/2 (as in ESM-2 and GPT-NeoX). Biases: T5, arXiv 1910.10683, section
2.1.
"""

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from protlm.attention import Attention
from protlm.attention.ops.numerics import in_float64, upcast, widest_dtype
from protlm.bounds import Bounds
from protlm.config import ModelConfig, Positions
from protlm.system.errors import UserError

_PERIOD = 10_000.0
# Numbers that a CPU rotates at a time: 1 MiB in float32, whose copies stay in its cache.
_CHUNK = 1 << 18


def sinusoids(length: int, width: int) -> Tensor:
    """Returns the table of sines and cosines, LD, float32."""
    frequency = _PERIOD ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width].float()


class PositionTable(nn.Module):
    """A table of one row per position; a learned one starts as sinusoids (protein_lm)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        table_LD = sinusoids(config.max_length, config.model_dim)
        if config.positions is Positions.learned:
            self.table = nn.Parameter(table_LD)
        else:
            self.register_buffer("table", table_LD, persistent=False)

    def forward(self, x_BLD: Tensor, *, start: int = 0, bounds: Bounds | None = None) -> Tensor:
        """Returns `x_BLD` with the rows of positions `start` to `start` + L - 1, or in proteins."""
        end = start + x_BLD.shape[1] if bounds is None else bounds.longest
        if end > self.table.shape[0]:
            raise UserError(
                f"{end} positions exceed the {self.table.shape[0]} of this model; "
                "use shorter sequences, or a model with model.positions=rotary"
            )
        rows = slice(start, end) if bounds is None else bounds.position_L
        return x_BLD + self.table[rows].to(x_BLD.dtype)


class Rotary(nn.Module):
    """Rotary positions: queries and keys are rotated by angles proportional to the position.

    The frequencies are base^(-2i/K). `stored` ones are saved with the weights: those of ESM-2 are
    rounded to half precision, as in its training. They stay float64 whatever the network is cast
    to, and on the CPU if its device has no float64.
    """

    def __init__(self, *, head_dim: int, stored: bool = False, base: float = _PERIOD) -> None:
        super().__init__()
        if head_dim % 2:
            raise UserError(f"rotary positions need an even head width, not {head_dim}")
        frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        self.frequency: Tensor
        self.register_buffer("frequency", frequency, persistent=stored)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the frequencies with the model, and never rounds them."""
        device = fn(self.frequency.float()).device
        if widest_dtype(device) == torch.float64:
            self.frequency = self.frequency.to(device)
        return self

    def angles(self, position_L: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines of positions, each LK, float32."""
        # In float32 the angle at position 35,000 has an error of 1e-3.
        angle_LK = (in_float64(position_L)[:, None] * self.frequency).repeat(1, 2)
        cos_LK, sin_LK = (x.float().to(position_L.device) for x in (angle_LK.cos(), angle_LK.sin()))
        return cos_LK, sin_LK


class RelativeBias(nn.Module):
    """Learned biases of logits, by head and by the bucket of the offset r = j - i of key j (T5).

    Offsets above 0 have the upper half of the buckets. Of the h of a side, the first e = h/2 have
    one distance each, and |r| ≥ e is in e + ⌊(h - e) ln(|r|/e) / ln(M/e)⌋, at most h - 1.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.max_distance, size = config.relative_distance, config.relative_buckets
        self.table = nn.Parameter(torch.randn(size, config.num_heads) * config.model_dim**-0.5)

    def check(self, mechanism: Attention) -> None:
        """Refuses a mechanism without logits to which the biases can be added."""
        if not mechanism.takes_bias:
            raise UserError(
                f"{type(mechanism).__name__} has no logits for the biases of "
                "model.positions=relative; choose attention=softmax, or other positions"
            )

    def forward(self, length: int, rows: slice) -> Tensor:
        """Returns the biases of the queries `rows` and of all keys, HML."""
        start, stop, _ = rows.indices(length)
        offset_O = torch.arange(1 - stop, length - start, device=self.table.device)
        bias_HO = self.table[self._buckets(offset_O)].T
        # The offsets of a query begin one before those of the query before it.
        return bias_HO.unfold(1, length, 1).flip(1).contiguous()

    def _buckets(self, offset_O: Tensor) -> Tensor:
        half = len(self.table) // 2
        near = half // 2
        distance_O = offset_O.abs()
        logarithm_O = (in_float64(distance_O).clamp(min=near) / near).log()
        far_O = (logarithm_O / math.log(self.max_distance / near) * (half - near)).long() + near
        far_O = far_O.clamp(max=half - 1).to(distance_O.device)
        return distance_O.where(distance_O < near, far_O) + half * (offset_O > 0)


def rotate(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    """Rotates queries or keys, in float32 or above, and returns them in their dtype.

    They are rotated as they are in memory, BLHK: a compiler would read across the heads of BHLK.
    """
    rotated_BLHK = _Rotation.apply(x_BHLK.transpose(1, 2), cos_LK[:, None], sin_LK[:, None])
    assert isinstance(rotated_BLHK, Tensor)
    return rotated_BLHK.transpose(1, 2)


class _Rotation(torch.autograd.Function):
    """A rotation, whose gradient is rotated back by the same angles.

    Autograd of the formula, with its slices and sums, takes several times as long.
    """

    @staticmethod
    def forward(ctx: Any, x_BLHK: Tensor, cos_L1K: Tensor, sin_L1K: Tensor) -> Tensor:
        ctx.save_for_backward(cos_L1K, sin_L1K)
        return _rotated(x_BLHK, cos_L1K, sin_L1K)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (drotated_BLHK,) = grad_outputs
        cos_L1K, sin_L1K = ctx.saved_tensors
        return _rotated(drotated_BLHK, cos_L1K, -sin_L1K), None, None


def _rotated(x_BLHK: Tensor, cos_L1K: Tensor, sin_L1K: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        # Out of place: a compiler makes several kernels of slices that are changed.
        (x, y), (cos, _), (sin, _) = (
            each.chunk(2, dim=-1) for each in (upcast(x_BLHK), cos_L1K, sin_L1K)
        )
        return torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1).to(x_BLHK.dtype)
    length = x_BLHK.shape[1]
    size = max(_CHUNK * length // max(x_BLHK.numel(), 1), 1)
    if size >= length or x_BLHK.device.type != "cpu":
        return _rotated_at_once(x_BLHK, cos_L1K, sin_L1K)
    rotated_BLHK = torch.empty_like(x_BLHK)
    for start in range(0, length, size):
        rows = slice(start, start + size)
        rotated_BLHK[:, rows] = _rotated_at_once(x_BLHK[:, rows], cos_L1K[rows], sin_L1K[rows])
    return rotated_BLHK


def _rotated_at_once(x_BLHK: Tensor, cos_L1K: Tensor, sin_L1K: Tensor) -> Tensor:
    half = x_BLHK.shape[-1] // 2
    upcast_BLHK = upcast(x_BLHK)
    rotated_BLHK = upcast_BLHK * cos_L1K
    rotated_BLHK[..., :half].addcmul_(upcast_BLHK[..., half:], sin_L1K[..., :half], value=-1)
    rotated_BLHK[..., half:].addcmul_(upcast_BLHK[..., :half], sin_L1K[..., half:])
    return rotated_BLHK.to(x_BLHK.dtype)
