"""The backend of linear attention: fused kernels where they agree with float64 on a small case.

They are checked once for each device, dtype and size: they may not compile, or not correctly.
"""

import importlib.util
import os
import warnings
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import assume_constant_result

from protlm.attention.linearized.features import FeatureMap, GeneralizedFeatures
from protlm.attention.linearized.function import LinearAttention, Weighting
from protlm.attention.linearized.normalization import Denominator
from protlm.attention.linearized.positive import ExponentialFeatureMap, PositiveFeatures
from protlm.system.errors import UserError

# Maps queries, keys, values and the mask to outputs.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# The largest relative errors in the small case, of outputs and gradients.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
# By the mode: wider heads would spill registers.
WIDEST = {
    False: {torch.bfloat16: 128, torch.float32: 64},
    True: {torch.bfloat16: 64, torch.float32: 16},
}
_NARROWEST_ON_HOPPER = 24
# The first has to be right before the others are run: wrong kernels read other memory there.
_BATCH, _HEADS, _LENGTHS = 2, 2, (330, 65, 64)
_HAS_TRITON = importlib.util.find_spec("triton") is not None
# Why fused kernels are not used in a case; an empty string if they are.
_reasons: dict["Case", str] = {}


class Backend(StrEnum):
    """What computes linear attention."""

    # Fused kernels on CUDA where they exist and pass the check, and PyTorch elsewhere.
    auto = "auto"
    torch = "torch"
    # Fused kernels, or an error.
    triton = "triton"


class Case(NamedTuple):
    """What fused kernels are compiled for; `num_rows` is None without a projection."""

    device: torch.device
    query_dtype: torch.dtype
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    key_width: int
    value_width: int
    num_rows: int | None
    is_exponential: bool
    causal: bool
    has_decay: bool = False

    @classmethod
    def of(
        cls, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, feature_map: FeatureMap, causal: bool
    ) -> "Case":
        dtypes = q_BHLK.dtype, k_BHLK.dtype, v_BHLC.dtype
        widths = q_BHLK.shape[-1], v_BHLC.shape[-1]
        rows_RK = feature_map.projection_RK
        num_rows = None if rows_RK is None else len(rows_RK)
        is_exponential = isinstance(feature_map, ExponentialFeatureMap)
        return cls(q_BHLK.device, *dtypes, *widths, num_rows, is_exponential, causal)


@assume_constant_result
def is_hopper(device: torch.device) -> bool:
    """Returns whether a device is a card of compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


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
    return fused_attention(feature_map, causal=case.causal)


def fused_attention(feature_map: FeatureMap, *, causal: bool) -> Attend:
    """Returns attention by fused kernels; imports Triton."""
    from protlm.attention.linearized.fused.attention import attention

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attention(q, k, v, mask, *feature_map.fused_rows(q), causal)[0]

    return attend


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
        return failure(case)
    # The interpreter on a CPU is what the tests compare with float64.
    return "" if os.environ.get("TRITON_INTERPRET") == "1" else "they need a GPU"


def failure(case: Case) -> str:
    """Compares fused kernels with PyTorch in float64; returns what is wrong, or an empty string."""
    exact = Weighting(_small_map(case, torch.float64), Denominator(), case.causal)
    for length in _LENGTHS:
        *inputs, cotangent_BHLC, mask_BL = _small_inputs(case, length)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                fused = fused_attention(_small_map(case, torch.float32), causal=case.causal)
                found = _with_gradients(fused, inputs, cotangent_BHLC, mask_BL)
                wanted = _with_gradients(
                    lambda *x: LinearAttention.apply(*x, exact),
                    [x.double() for x in inputs],
                    cotangent_BHLC.double(),
                    mask_BL,
                )
        except torch.OutOfMemoryError:
            # Another batch may fit.
            raise
        except Exception as error:  # compilers raise errors of many kinds
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        pairs = zip(found, wanted, strict=True)
        errors = [float((x.double() - y).norm() / y.norm()) for x, y in pairs]
        tolerance = max(TOLERANCES[x.dtype] for x in inputs)
        # NaN is not within the tolerance either.
        if not all(error <= tolerance for error in errors):
            return f"relative errors of {', '.join(f'{error:.1e}' for error in errors)}"
    return ""


def _small_map(case: Case, dtype: torch.dtype) -> FeatureMap:
    generator = torch.Generator().manual_seed(0)
    rows_RK = None
    if case.num_rows is not None:
        rows_RK = torch.randn(case.num_rows, case.key_width, generator=generator)
        rows_RK = rows_RK.to(case.device, dtype)
    if case.is_exponential:
        return PositiveFeatures(rows_RK)
    return GeneralizedFeatures(rows_RK, kernel="relu", epsilon=1e-3)


def _small_inputs(case: Case, length: int) -> list[Tensor]:
    generator, device = torch.Generator().manual_seed(1), case.device
    dtypes = case.query_dtype, case.key_dtype, case.value_dtype, case.value_dtype
    widths = case.key_width, case.key_width, case.value_width, case.value_width
    drawn = [
        torch.randn(_BATCH, length, _HEADS, width, generator=generator).to(device, dtype)
        for dtype, width in zip(dtypes, widths, strict=True)
    ]
    mask_BL = torch.ones(_BATCH, length, dtype=torch.bool, device=device)
    mask_BL[1, length // 3 :] = False
    return [*(x.transpose(1, 2) for x in drawn), mask_BL]


def _with_gradients(
    attend: Callable[..., Tensor | None], inputs: list[Tensor], cotangent: Tensor, mask_BL: Tensor
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves, mask_BL)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]
