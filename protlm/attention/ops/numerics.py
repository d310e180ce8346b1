"""Precision, padding and masks: what all mechanisms compute alike."""

import math
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Calls a function of tensors without keeping its intermediate results for the backward pass.
recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
# The decorator, whose types lose the arguments of a function.
not_compiled: Any = torch.compiler.disable


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Disables autocast, so that results have the dtype of their operands."""
    return torch.autocast(x.device.type, enabled=False)


def accum_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype to accumulate in: float32, or float64 for a float64 tensor."""
    return torch.promote_types(x.dtype, torch.float32)


def upcast(x: Tensor) -> Tensor:
    """Casts a tensor to float32; a float64 tensor is returned unchanged."""
    return x.to(accum_dtype(x))


def widest_dtype(device: torch.device) -> torch.dtype:
    """Returns float64, or float32 on a device without it, a GPU of Apple."""
    return torch.float32 if device.type == "mps" else torch.float64


def in_float64(x: Tensor) -> Tensor:
    """Casts a tensor to float64, on the CPU if its device does not have it."""
    return (x if widest_dtype(x.device) == torch.float64 else x.cpu()).double()


def zero_padding(x_BHLK: Tensor, mask_BL: Tensor) -> Tensor:
    """Sets padded positions to 0; a weight of 0 would not do, because padding may be NaN."""
    return torch.where(mask_BL[:, None, :, None], x_BHLK, 0)


def visible_keys(mask_BL: Tensor, rows: slice, *, causal: bool) -> Tensor:
    """Returns the mask of keys visible to `rows`, (B, 1, rows, L); false for rows at padding."""
    visible_B1ML = mask_BL[:, None, rows, None] & mask_BL[:, None, None, :]
    if causal:
        position_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
        visible_B1ML = visible_B1ML & (position_L <= position_L[rows, None])
    return visible_B1ML


def visible_softmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Computes softmax over the visible entries of the last axis, 0 elsewhere and without any."""
    # The floor is finite, so that a row without visible entries is 0 below and not NaN.
    floor = torch.finfo(logits.dtype).min
    return logits.masked_fill(~visible, floor).softmax(dim=-1).masked_fill(~visible, 0)


def softmax_weights(
    q_BHMK: Tensor, k_BHLK: Tensor, visible: Tensor, bias_HML: Tensor | None = None
) -> Tensor:
    """Computes softmax(q kᵀ / √K + bias) over the visible keys, BHML, in float32 or float64."""
    with no_autocast(q_BHMK):
        logits_BHML = upcast(q_BHMK) @ upcast(k_BHLK).mT / math.sqrt(q_BHMK.shape[-1])
    if bias_HML is not None:
        logits_BHML = logits_BHML + bias_HML
    return visible_softmax(logits_BHML, visible)


def padding_bias(mask_BL: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what to add to the logits of keys, BL: 0, and at padding far less than any logit.

    Finite, so that a row that sees no key is the mean of its values and not NaN.
    """
    return torch.zeros_like(mask_BL, dtype=dtype).masked_fill(~mask_BL, torch.finfo(dtype).min / 2)


def at_once(x: Tensor, numbers: int, *, cpu: int, gpu: int) -> int:
    """Returns how many parts of some numbers to compute together, to fit caches or occupy a GPU."""
    return max((cpu if x.device.type == "cpu" else gpu) // numbers, 1)
