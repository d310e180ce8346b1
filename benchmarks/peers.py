"""What protlm is measured against: PyTorch's own attention, performer-pytorch, fla-core.

performer-pytorch and fla-core come from `benchmarks/requirements.txt` and never enter the product;
where one is missing or cannot run, `UnavailableError` says why and the tables repeat it.
"""

import contextlib
import importlib
import io
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cases import HEAD_DIM, PERFORMER_PYTORCH, RETURNS_V, SDPA, TWO_FLASH, Attend, Case
from benchmarks.two_flash import two_flash


class UnavailableError(Exception):
    """A contender cannot take part; the message says why."""


def returns_values(case: Case, device: torch.device) -> Attend:
    """Attention that returns V: what no mechanism can beat (arXiv 2009.14794, figure 3)."""

    def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        # A product, because the gradient of a copy costs nothing at all.
        return v_BHLC * 1.0

    return attend


def sdpa(case: Case, device: torch.device) -> Attend:
    """PyTorch's exact attention, by the kernel that PyTorch chooses."""

    def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        return scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLC, is_causal=case.causal)

    return attend


def cudnn(case: Case, device: torch.device) -> Attend:
    """Exact attention by cuDNN's kernels."""
    if device.type != "cuda":
        raise UnavailableError("needs a CUDA device")

    def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLC, is_causal=case.causal)

    return attend


def two_flash_calls(case: Case, device: torch.device) -> Attend:
    """The other form of our own bidirectional FAVOR+, of which decision 0006 tells."""
    if case.causal:
        raise UnavailableError("has no causal form")
    if device.type != "cpu":
        raise UnavailableError("is written with the CPU's fused kernel")
    return two_flash(case, device)


def performer_pytorch(case: Case, device: torch.device) -> Attend:
    """The FastAttention of performer-pytorch; causal without its CUDA extension."""
    package = _installed("performer_pytorch")
    # It prints that the CUDA extension is missing each time a causal one is built.
    with contextlib.redirect_stdout(io.StringIO()):
        return package.FastAttention(HEAD_DIM, case.features, causal=case.causal).to(device)


def fla_core(case: Case, device: torch.device) -> Attend:
    """The normalised chunked linear attention of fla-core, on positive features made by PyTorch."""
    if device.type != "cuda":
        raise UnavailableError("needs a CUDA device")
    if not case.causal:
        raise UnavailableError("has no bidirectional form")
    package = _installed("fla.ops.linear_attn")
    projection_RK = torch.randn(case.features or HEAD_DIM, HEAD_DIM, device=device)

    def features(x_BHLK: Tensor) -> Tensor:
        scaled_BHLK = x_BHLK.float() * HEAD_DIM**-0.25
        half_square_BHL1 = scaled_BHLK.square().sum(-1, keepdim=True) / 2
        return (scaled_BHLK @ projection_RK.mT - half_square_BHL1).exp().to(x_BHLK.dtype)

    def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        # Its axes are batch, position, head, width.
        phi_q, phi_k, v = (x.transpose(1, 2) for x in (features(q_BHLK), features(k_BHLK), v_BHLC))
        out, _ = package.chunk_linear_attn(phi_q, phi_k, v, scale=1.0, normalize=True)
        return out.transpose(1, 2)

    return attend


def _installed(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(f"{error}; `make bench-attention` installs the peers") from error


# Each with whether it takes a number of features.
PEERS: dict[str, tuple[bool, Callable[[Case, torch.device], Attend]]] = {
    RETURNS_V: (False, returns_values),
    SDPA: (False, sdpa),
    "cuDNN": (False, cudnn),
    PERFORMER_PYTORCH: (True, performer_pytorch),
    TWO_FLASH: (True, two_flash_calls),
    "fla-core": (True, fla_core),
}
