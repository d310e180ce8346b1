"""The matrix products that linear attention is made of, by the fastest library at hand."""

import math
import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# A call of oneDNN costs some 17 µs: MKL is ahead below this number of multiplications on two
# threads, and below half of it on one. The choice must not depend on the threads, whose number may
# change before the backward. Sums over more positions are not left to MKL, which is less exact.
_SMALL, _SHORT = 1 << 21, 512


def operand_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype to round operands to: bfloat16 for bfloat16 inputs on CUDA, or None.

    Tensor cores multiply bfloat16 some ten times as fast as float32 is multiplied without them.
    """
    return torch.bfloat16 if x.is_cuda and x.dtype == torch.bfloat16 else None


def may_round_on_cpu(x: Tensor) -> bool:
    """Returns whether a tensor is bfloat16 on a processor that multiplies it.

    Products are twice as fast as in float32 there. Their sums are float32, but torch has no product
    that returns these: results are bfloat16.
    """
    return x.dtype == torch.bfloat16 and _is_plain_on_cpu(x) and cpu_multiplies_bfloat16()


def cpu_multiplies_bfloat16() -> bool:
    """Returns whether the processor has products of bfloat16, and need not emulate them."""
    # torch has no public name for these. A build without them has no bfloat16 kernels.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def product(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns x wᵀ, (..., M, N), plus a bias, (N) or (..., N).

    w is (N, K), the same for every leading index of x, or (..., N, K). With a dtype, which x may
    have, operands are rounded to it. The result is float32 on CUDA, where w is (..., N, K), and of
    that dtype on a CPU.
    """
    if dtype is not None or x.dtype == torch.bfloat16:
        return _rounded_product(x, w.mT, dtype or x.dtype, bias)
    if takes_onednn(x) and not _are_small(x, w):
        return _onednn_product(x, w, bias)
    out = torch.matmul(x, w.mT)
    return out if bias is None else out.add_(bias[..., None, :])


def matrix_product(
    x: Tensor, y: Tensor, *, onto: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns x y for each leading index, added to `onto` in place; `dtype` as in `product`."""
    if dtype is not None:
        out = _rounded_product(x, y, dtype).to(torch.float32)
        return out if onto is None else onto.add_(out)
    leading = x.shape[:-2]
    x, y = x.flatten(0, -3), y.flatten(0, -3)
    if onto is None:
        return torch.bmm(x, y).unflatten(0, leading)
    return onto.flatten(0, -3).baddbmm_(x, y).unflatten(0, leading)


def _rounded_product(
    x: Tensor, y: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    leading = x.shape[:-2]
    x, y = x.to(dtype), y.to(dtype)
    if x.device.type != "cpu":
        # Without `out_dtype` the sums would be rounded as well.
        out = torch.bmm(x.flatten(0, -3), y.flatten(0, -3), out_dtype=torch.float32)
        out = out.unflatten(0, leading)
    elif y.shape[:-2].numel() > 1:
        out = x @ y
    elif x.is_contiguous() and _has_onednn(dtype):
        # The bias is not rounded.
        return _onednn_product(x, y.mT, bias)
    else:
        # A batch of one would take another kernel.
        out = (x.flatten(0, -2) @ y.view(y.shape[-2:])).unflatten(0, x.shape[:-1])
    return out if bias is None else out.add_(bias[..., None, :])


def takes_onednn(x: Tensor) -> bool:
    """Returns whether oneDNN is to multiply this tensor, in the place of what torch takes."""
    return x.dtype == torch.float32 and _is_plain_on_cpu(x) and _has_onednn() and _is_amd()


def _is_plain_on_cpu(x: Tensor) -> bool:
    # torch's compiler and its tracer have no form for the bare operator.
    is_tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    return x.device.type == "cpu" and not (is_tracing or torch.compiler.is_compiling())


def _are_small(x: Tensor, w: Tensor) -> bool:
    """Whether each leading index has a separate product, of a short sequence: one call of MKL."""
    sizes = x.shape[-2], w.shape[-2], w.shape[-1]
    return w.dim() > 2 and max(sizes) <= _SHORT and math.prod(sizes) < _SMALL


def _onednn_product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    if w.shape[:-2].numel() == 1:
        # Most tiles have one head.
        return _linear(x, w.view(w.shape[-2:]), None if bias is None else bias.view(-1))
    leading = x.shape[:-2]
    x, w = x.flatten(0, -3), w.flatten(0, -3)
    biases = [None] * len(x) if bias is None else bias.flatten(0, -2)
    products = [_linear(*operands) for operands in zip(x, w, biases, strict=True)]
    return torch.stack(products).unflatten(0, leading)


def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    # Without AVX-512, oneDNN multiplies rows that do not touch one another by its reference
    # kernel, some thousand times slower: a head's rows of a tensor BLHK are such rows.
    if not (w.is_contiguous() or w.mT.is_contiguous()):
        w = w.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), w, bias, "none", [], "")


@cache
def _has_onednn(dtype: torch.dtype = torch.float32) -> bool:
    has = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    # Not for emulated products.
    return has and (dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _is_amd() -> bool:
    """Whether the processor is one on which oneDNN is known to be ahead of what torch takes.

    That is MKL, which uses half the width of an AMD processor's registers: the products here take
    twice the time. On Intel's it is ahead of oneDNN (docs/decisions/0006).
    """
    cpuinfo = Path("/proc/cpuinfo")
    about = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    return "AuthenticAMD" in about
