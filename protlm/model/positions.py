"""Position encodings: learned or sinusoidal tables added to the embeddings, or rotary angles.

Sinusoids: arXiv 1706.03762, section 3.5. Rotary: arXiv 2104.09864, equation 34, in the layout that
pairs coordinate i with i + K/2 (as in ESM-2 and GPT-NeoX).
"""

from typing import Any

import torch
from torch import Tensor, nn

from protlm.attention.ops.numerics import upcast
from protlm.system.errors import UserError

_PERIOD = 10_000.0
# Numbers that a CPU rotates at a time: 1 MiB in float32, whose copies stay in its cache.
_CHUNK = 1 << 18


def sinusoids(length: int, width: int) -> Tensor:
    """Returns the table of sines and cosines, LD, float32."""
    frequency = _PERIOD ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    table_LD = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]
    return table_LD.float()


class PositionTable(nn.Module):
    """A table of one row per position; a learned one starts as sinusoids (protein_lm)."""

    def __init__(self, *, max_length: int, model_dim: int, learned: bool) -> None:
        super().__init__()
        table_LD = sinusoids(max_length, model_dim)
        if learned:
            self.table = nn.Parameter(table_LD)
        else:
            self.register_buffer("table", table_LD, persistent=False)

    def forward(self, x_BLD: Tensor, *, start: int = 0) -> Tensor:
        """Returns `x_BLD` with the table's rows of positions `start` to `start` + L - 1 added."""
        end = start + x_BLD.shape[1]
        if end > self.table.shape[0]:
            raise UserError(
                f"{end} positions exceed the {self.table.shape[0]} of this model; "
                "use shorter sequences, or a model with model.positions=rotary"
            )
        return x_BLD + self.table[start:end].to(x_BLD.dtype)


class Rotary(nn.Module):
    """Rotary positions: queries and keys are rotated by angles proportional to the position.

    The frequencies are base^(-2i/K). `stored` ones are saved with the weights: those of ESM-2 are
    rounded to half precision, as in its training.
    """

    def __init__(self, *, head_dim: int, stored: bool = False, base: float = _PERIOD) -> None:
        super().__init__()
        if head_dim % 2:
            raise UserError(f"rotary positions need an even head width, not {head_dim}")
        frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        self.frequency: Tensor
        self.register_buffer("frequency", frequency, persistent=stored)

    def angles(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of positions `start` to `end` - 1, each LK, float32."""
        position = torch.arange(start, end, dtype=torch.float64, device=self.frequency.device)
        # In float32 the angle at position 35,000 has an error of 1e-3.
        angle_LK = (position[:, None] * self.frequency).repeat(1, 2)
        return angle_LK.cos().float(), angle_LK.sin().float()


def rotate(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    """Rotates queries or keys, in float32 or above, and returns them in their dtype."""
    rotated_BHLK = _Rotation.apply(x_BHLK, cos_LK, sin_LK)
    assert isinstance(rotated_BHLK, Tensor)
    return rotated_BHLK


class _Rotation(torch.autograd.Function):
    """A rotation, whose gradient is rotated back by the same angles.

    Autograd of the formula, with its slices and sums, takes several times as long.
    """

    @staticmethod
    def forward(ctx: Any, x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
        ctx.save_for_backward(cos_LK, sin_LK)
        return _rotated(x_BHLK, cos_LK, sin_LK)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (drotated_BHLK,) = grad_outputs
        cos_LK, sin_LK = ctx.saved_tensors
        return _rotated(drotated_BHLK, cos_LK, -sin_LK), None, None


def _rotated(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    length = x_BHLK.shape[2]
    size = max(_CHUNK * length // max(x_BHLK.numel(), 1), 1)
    if size >= length or x_BHLK.device.type != "cpu" or torch.compiler.is_compiling():
        return _rotated_at_once(x_BHLK, cos_LK, sin_LK)
    rotated_BHLK = torch.empty_like(x_BHLK)
    for start in range(0, length, size):
        rows = slice(start, start + size)
        rotated_BHLK[:, :, rows] = _rotated_at_once(x_BHLK[:, :, rows], cos_LK[rows], sin_LK[rows])
    return rotated_BHLK


def _rotated_at_once(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    half = x_BHLK.shape[-1] // 2
    upcast_BHLK = upcast(x_BHLK)
    rotated_BHLK = upcast_BHLK * cos_LK
    rotated_BHLK[..., :half].addcmul_(upcast_BHLK[..., half:], sin_LK[:, :half], value=-1)
    rotated_BHLK[..., half:].addcmul_(upcast_BHLK[..., :half], sin_LK[:, half:])
    return rotated_BHLK.to(x_BHLK.dtype)
