"""Where a residue stands: learned or sinusoidal tables added to the embeddings, or rotary angles.

Sinusoids: arXiv 1706.03762, section 3.5. Rotary: arXiv 2104.09864, equation 34, in the layout that
pairs coordinate i with i + K/2 (as ESM-2 and GPT-NeoX do).
"""

from typing import Any

import torch
from torch import Tensor, nn

from protlm.config import Positions
from protlm.errors import UserError

_PERIOD = 10_000.0
# A CPU turns so many numbers at a time, a MiB in float32, whose copies then stay in its cache.
_PIECE = 1 << 18


def sinusoids(length: int, width: int) -> Tensor:
    """The table of sines and cosines, LD, float32."""
    frequency = _PERIOD ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    table_LD = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]
    return table_LD.float()


class PositionTable(nn.Module):
    """Adds a row per position; learned tables start as sinusoids (google-research/protein_lm)."""

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
                f"{end} positions are more than the {self.table.shape[0]} this model has; "
                "use shorter sequences, or a model with model.positions=rotary"
            )
        return x_BLD + self.table[start:end].to(x_BLD.dtype)


class Rotary(nn.Module):
    """Turns queries and keys by angles that grow with the position; norms do not change."""

    def __init__(self, *, head_dim: int) -> None:
        super().__init__()
        if head_dim % 2:
            raise UserError(f"rotary positions need an even head width, not {head_dim}")
        frequency = _PERIOD ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        self.frequency: Tensor
        self.register_buffer("frequency", frequency, persistent=False)

    def angles(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions `start` to `end` - 1, each LK, float32."""
        position = torch.arange(start, end, dtype=torch.float64, device=self.frequency.device)
        # In float32 the angle at position 35,000 is off by 1e-3.
        angle_LK = (position[:, None] * self.frequency).repeat(1, 2)
        return angle_LK.cos().float(), angle_LK.sin().float()


def rotate(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    """Applies rotary angles to queries or keys, in float32 at least, and returns their dtype."""
    turned_BHLK = _Rotation.apply(x_BHLK, cos_LK, sin_LK)
    assert isinstance(turned_BHLK, Tensor)
    return turned_BHLK


class _Rotation(torch.autograd.Function):
    """A rotation, whose gradient is turned back by the same angles.

    Left to autograd, the slices and sums of the formula take several times as long.
    """

    @staticmethod
    def forward(ctx: Any, x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
        ctx.save_for_backward(cos_LK, sin_LK)
        return _turned(x_BHLK, cos_LK, sin_LK)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dturned_BHLK,) = grad_outputs
        cos_LK, sin_LK = ctx.saved_tensors
        return _turned(dturned_BHLK, cos_LK, -sin_LK), None, None


def _turned(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    length = x_BHLK.shape[2]
    size = max(_PIECE * length // x_BHLK.numel(), 1)
    if size >= length or x_BHLK.device.type != "cpu" or torch.compiler.is_compiling():
        return _turned_at_once(x_BHLK, cos_LK, sin_LK)
    turned_BHLK = torch.empty_like(x_BHLK)
    for start in range(0, length, size):
        rows = slice(start, start + size)
        turned_BHLK[:, :, rows] = _turned_at_once(x_BHLK[:, :, rows], cos_LK[rows], sin_LK[rows])
    return turned_BHLK


def _turned_at_once(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    half = x_BHLK.shape[-1] // 2
    wide_BHLK = x_BHLK.to(torch.promote_types(x_BHLK.dtype, torch.float32))
    turned_BHLK = wide_BHLK * cos_LK
    turned_BHLK[..., :half].addcmul_(wide_BHLK[..., half:], sin_LK[:, :half], value=-1)
    turned_BHLK[..., half:].addcmul_(wide_BHLK[..., :half], sin_LK[:, half:])
    return turned_BHLK.to(x_BHLK.dtype)


def position_table(
    positions: Positions, *, max_length: int, model_dim: int
) -> PositionTable | None:
    """The module that adds positions to embeddings; rotary models add nothing."""
    if positions is Positions.rotary:
        return None
    return PositionTable(
        max_length=max_length, model_dim=model_dim, learned=positions is Positions.learned
    )
