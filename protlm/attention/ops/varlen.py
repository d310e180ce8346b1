"""Exact softmax of packed proteins on a GPU, by the kernel of torch for several lengths."""

import math
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from protlm.attention.ops.numerics import zero_padding
from protlm.bounds import Bounds

_WHERE = "torch.nn.attention.varlen"
# Exported models run with torch before 2.10, too, which has none, and that of 2.10 has no window.
varlen_attn: Any = import_module(_WHERE).varlen_attn if find_spec(_WHERE) else None
_HAS_WINDOW = varlen_attn and "window_size" in signature(varlen_attn).parameters
_DTYPES, _WIDEST = (torch.bfloat16, torch.float16), 256


def varlen_softmax(
    heads: Sequence[Tensor], mask_BL: Tensor, bounds: Bounds, window: tuple[int, int]
) -> Tensor | None:
    """Computes softmax(q kᵀ / √K) v within each protein, BHLC; None where there is no kernel.

    A query sees as many keys before and after its own as the window says; -1 is all of them.
    """
    dtype, width, device = heads[2].dtype, heads[2].shape[-1], heads[2].device
    if not (_HAS_WINDOW and _is_card(device) and dtype in _DTYPES) or width % 8 or width > _WIDEST:
        return None
    # Norms leave queries and keys in float32. Gradients at padding are 0 if it is finite.
    finite = (zero_padding(x.to(dtype), mask_BL)[0].transpose(0, 1) for x in heads)
    ends, scale = (bounds.cu_seqlens,) * 2, 1 / math.sqrt(heads[0].shape[-1])
    sizes = *ends, bounds.longest, bounds.longest
    out_LHC = varlen_attn(*finite, *sizes, scale=scale, window_size=window)
    return zero_padding(out_LHC.transpose(0, 1)[None], mask_BL)


def _is_card(device: torch.device) -> bool:
    # The kernel needs an A100 or newer.
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
