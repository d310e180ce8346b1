"""Padding and causality as masks, shared by the mechanisms."""

import torch
from torch import Tensor


def zero_padding(x_BHLK: Tensor, mask_BL: Tensor) -> Tensor:
    """Sets padded positions to 0.

    A weight of exactly 0 does not stop a NaN in the padding; a 0 in its place does.
    """
    return torch.where(mask_BL[:, None, :, None], x_BHLK, 0)


def visible_keys(mask_BL: Tensor, rows: slice, *, causal: bool) -> Tensor:
    """Where an output of `rows` may look: (B, 1, rows, L), all false for an output at padding."""
    visible_B1ML = mask_BL[:, None, rows, None] & mask_BL[:, None, None, :]
    if causal:
        position_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
        visible_B1ML = visible_B1ML & (position_L <= position_L[rows, None])
    return visible_B1ML
