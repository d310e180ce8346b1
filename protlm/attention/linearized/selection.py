"""The backend of linear attention: fused kernels where they agree with float64 on a small case.

They are checked once for each device, dtype and size: they may not compile, or not correctly.
"""

import importlib.util
import os
import warnings
from enum import StrEnum
from typing import Any

import torch
from torch.compiler import assume_constant_result

from protlm.attention.linearized.case import TOLERANCES, Attend, Case, is_hopper
from protlm.attention.linearized.features import FeatureMap
from protlm.attention.linearized.normalization import Denominator
from protlm.system.errors import UserError

# By the mode: wider heads would spill registers.
WIDEST = {
    False: {torch.bfloat16: 128, torch.float32: 64},
    True: {torch.bfloat16: 64, torch.float32: 16},
}
_NARROWEST_ON_HOPPER = 24
_HAS_TRITON = importlib.util.find_spec("triton") is not None
# Why fused kernels are not used in a case; an empty string if they are.
_reasons: dict[Case, str] = {}


class Backend(StrEnum):
    """What computes linear attention."""

    # Fused kernels on CUDA where they exist and pass the check, and PyTorch elsewhere.
    auto = "auto"
    torch = "torch"
    # Fused kernels, or an error.
    triton = "triton"


def has_fused(feature_map: FeatureMap, normalizer: Denominator) -> bool:
    """Returns whether there are fused kernels for these features and this normalizer."""
    return feature_map.has_fused and normalizer == Denominator()


def chosen_attention(
    backend: Backend, feature_map: FeatureMap, normalizer: Denominator, case: Case
) -> Attend | None:
    """Returns attention by fused kernels, or None for PyTorch."""
    is_demanded = backend == Backend.triton
    is_possible = _is_card(case.device) and has_fused(feature_map, normalizer)
    if not is_demanded and (backend == Backend.torch or not is_possible):
        return None
    if not is_usable(is_demanded, *case):
        return None
    # It imports Triton.
    from protlm.attention.linearized.fused.attention import fused_attention

    return fused_attention(feature_map, causal=case.causal)


def _is_card(device: torch.device) -> bool:
    return device.type == "cuda"


# The compiler of torch calls it once, instead of tracing it; a cache of functools would be traced.
@assume_constant_result
def is_usable(is_demanded: bool, *sizes: Any) -> bool:
    """Returns whether fused kernels are used in a case, which the compiler demands unpacked.

    If not, it warns the first time, or refuses kernels that are demanded.
    """
    case = Case(*sizes)
    is_new = case not in _reasons
    if is_new:
        _reasons[case] = _reason(case)
    reason = _reasons[case]
    if reason and is_demanded:
        raise UserError(
            f"attention.backend=triton cannot be used on {case.device}: {reason}; "
            "set attention.backend=auto"
        )
    if reason and is_new:
        warnings.warn(
            f"the fused attention kernels are not used on {case.device}: {reason}; attention "
            "runs in PyTorch, which is slower (attention.backend=torch avoids this message)",
            stacklevel=2,
        )
    return not reason


def _reason(case: Case) -> str:
    """Returns why fused kernels are not used; an empty string if they are."""
    if case.has_decay:
        return "they have no decay, unlike attention.decay"
    if not _HAS_TRITON:
        return "the package triton is missing, which comes with torch for CUDA"
    widest, mode = WIDEST[case.causal], "causal" if case.causal else "bidirectional"
    has_dtypes = {case.query_dtype, case.key_dtype, case.value_dtype} <= set(TOLERANCES)
    if not has_dtypes or max(case.key_width, case.value_width) > widest[case.value_dtype]:
        return (
            f"they take heads of up to {widest[torch.bfloat16]} channels in bfloat16 and "
            f"{widest[torch.float32]} in float32 in {mode} attention, not {case.key_width} in "
            f"{case.value_dtype}"
        )
    num_features = case.num_rows or case.key_width
    is_narrow = num_features < _NARROWEST_ON_HOPPER and case.value_dtype == torch.bfloat16
    if is_narrow and case.causal and is_hopper(case.device):
        # The compiler may err there.
        return (
            f"causal attention in bfloat16 needs {_NARROWEST_ON_HOPPER} features or more on this "
            f"card, and has {num_features}"
        )
    if _is_card(case.device):
        from protlm.attention.linearized.fused.check import verdict

        return verdict(case)
    # The interpreter on a CPU is what the tests compare with float64.
    return "" if os.environ.get("TRITON_INTERPRET") == "1" else "they need a GPU"
