"""Unit vectors times learned scales, σ ⊙ x / (|x| + 10⁻³), a tile of positions at a time."""

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.performer.tiles import Tile, tiles
from protlm.attention.precision import full_precision, wide, wide_dtype

# Beside the norm that a vector is divided by, as in the released code of arXiv 2103.02143.
NORM_EPSILON = 1e-3


class ScaledUnitVectors(torch.autograd.Function):
    """`apply(x, scales, mask)` returns σ ⊙ x / (|x| + 10⁻³), BHLK, and 0 at padding.

    In float32 (float64 for float64 x). By torch's own operations this would take a dozen passes
    over memory, half the time of attention to a long sequence.

    Args:
        x_BHLK: queries or keys.
        scales_H1K: σ.
        mask_BL: true where there is a residue or special token.
    """

    @staticmethod
    def forward(ctx: Any, x_BHLK: Tensor, scales_H1K: Tensor, mask_BL: Tensor) -> Tensor:
        """Divides by the norms, then scales."""
        out_BHLK = torch.empty_like(x_BHLK, dtype=wide_dtype(x_BHLK))
        with full_precision(x_BHLK):
            for tile in _all_tiles(x_BHLK):
                unit, _, _ = _Unit.of(x_BHLK, mask_BL, tile)
                torch.mul(unit, wide(scales_H1K[tile.heads]), out=tile.of(out_BHLK))
        ctx.save_for_backward(x_BHLK, scales_H1K, mask_BL)
        return out_BHLK

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """With u = x / (|x| + ε): dx = (du - u (u·du) (|x| + ε) / |x|) / (|x| + ε)."""
        (dout_BHLK,) = grad_outputs
        x_BHLK, scales_H1K, mask_BL = ctx.saved_tensors
        dx_BHLK = torch.empty_like(x_BHLK)
        dscales_H1K = torch.zeros_like(scales_H1K, dtype=dout_BHLK.dtype)
        with full_precision(x_BHLK):
            for tile in _all_tiles(x_BHLK):
                unit, norm, is_padding = _Unit.of(x_BHLK, mask_BL, tile)
                dtile = tile.of(dout_BHLK).masked_fill(is_padding, 0)
                dscales_H1K[tile.heads] += (dtile * unit).sum(dim=(0, 2))[:, None]
                dunit = dtile.mul_(wide(scales_H1K[tile.heads]))
                along = (dunit * unit).sum(dim=-1, keepdim=True)
                # u is 0 where |x| is: any finite quotient does.
                tiny = torch.finfo(norm.dtype).tiny
                along *= (norm + NORM_EPSILON) / norm.clamp(min=tiny)
                dunit -= unit.mul_(along)
                tile.of(dx_BHLK)[:] = dunit.div_(norm + NORM_EPSILON)
        return dx_BHLK, dscales_H1K.to(scales_H1K.dtype), None


class _Unit(NamedTuple):
    """x / (|x| + ε) and |x| of a tile, both 0 at padding, and where that is."""

    unit: Tensor
    norm: Tensor
    is_padding: Tensor

    @classmethod
    def of(cls, x_BHLK: Tensor, mask_BL: Tensor, tile: Tile) -> "_Unit":
        is_padding = ~mask_BL[tile.samples, None, tile.rows, None]
        x = wide(tile.of(x_BHLK)).masked_fill(is_padding, 0)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return cls(x.div_(norm + NORM_EPSILON), norm, is_padding)


def _all_tiles(x_BHLK: Tensor) -> Iterator[Tile]:
    return chain.from_iterable(tiles(x_BHLK, num_features=x_BHLK.shape[-1]))
