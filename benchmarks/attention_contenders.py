"""The contenders of the attention benchmarks: the mechanisms of protlm and their peers.

performer-pytorch and fla-core come from `benchmarks/requirements.txt` and are not dependencies of
protlm. A peer that is missing or cannot run raises `UnavailableError` with the reason.
"""

import contextlib
import importlib
import io
import warnings
from dataclasses import dataclass
from types import ModuleType

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention_passes import DTYPES, HEAD_DIM, MODEL_DIM, NUM_HEADS, Attend, Case
from benchmarks.harness import UnavailableError
from protlm.attention import Attention, create
from protlm.attention.base import Context
from protlm.system.paths import shipped

SDPA, PERFORMER_PYTORCH = "SDPA", "performer-pytorch"


@dataclass(frozen=True)
class _Mechanism:
    """A mechanism of protlm together with its hidden input."""

    mechanism: Attention
    hidden_BLD: Tensor
    mask_BL: Tensor
    causal: bool

    @property
    def more_leaves(self) -> list[Tensor]:
        """The tensors that have a gradient in training beside queries, keys and values."""
        return [self.hidden_BLD, *self.mechanism.parameters()]

    def __call__(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        context = Context(self.hidden_BLD, self.mask_BL, self.causal)
        return self.mechanism(q_BHLK, k_BHLK, v_BHLC, context)


def ours(name: str, case: Case, features: int | None = None) -> Attend:
    """Builds a mechanism of protlm with the options it ships with.

    Args:
        name: the name of the mechanism.
        case: the input.
        features: the number of random features, if not the shipped one.

    Raises:
        UnavailableError: the mechanism does not have the mode.
    """
    loaded = OmegaConf.to_container(OmegaConf.load(shipped("conf") / "attention" / f"{name}.yaml"))
    assert isinstance(loaded, dict)
    settings = {str(key): value for key, value in loaded.items() if key != "name"}
    if features is not None:
        settings["num_features"] = features
    mechanism = create(
        name,
        settings,
        num_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        model_dim=MODEL_DIM,
        max_length=case.length,
    ).to(case.device)
    if not (mechanism.supports_causal if case.causal else mechanism.supports_bidirectional):
        raise UnavailableError(f"has no {case.mode} form")
    generator = torch.Generator().manual_seed(case.length)
    hidden_BLD = torch.randn(1, case.length, MODEL_DIM, generator=generator)
    hidden_BLD = hidden_BLD.to(case.device, DTYPES[case.dtype]).requires_grad_()
    mask_BL = torch.ones(1, case.length, dtype=torch.bool, device=case.device)
    return _Mechanism(mechanism, hidden_BLD, mask_BL, case.causal)


def sdpa(case: Case) -> Attend:
    """Builds PyTorch's exact attention, with the kernel that PyTorch chooses."""

    def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        return scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLC, is_causal=case.causal)

    return attend


def cudnn(case: Case) -> Attend:
    """Builds exact attention with the kernels of cuDNN."""
    _require_cuda(case)

    def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLC, is_causal=case.causal)

    return attend


def performer_pytorch(case: Case, features: int) -> Attend:
    """Builds the FastAttention of performer-pytorch, without its CUDA extension if causal."""
    package = installed("performer_pytorch")
    # It prints that the CUDA extension is missing each time a causal one is built.
    with contextlib.redirect_stdout(io.StringIO()):
        return package.FastAttention(HEAD_DIM, features, causal=case.causal).to(case.device)


def fla_core(case: Case, features: int) -> Attend:
    """Builds the chunked linear attention of fla-core on positive features made by PyTorch."""
    _require_cuda(case)
    if not case.causal:
        raise UnavailableError("has no bidirectional form")
    package = installed("fla.ops.linear_attn")
    projection_RK = torch.randn(features, HEAD_DIM, device=case.device)

    def make_features(x_BHLK: Tensor) -> Tensor:
        scaled_BHLK = x_BHLK.float() * HEAD_DIM**-0.25
        half_square_BHL1 = scaled_BHLK.square().sum(-1, keepdim=True) / 2
        return (scaled_BHLK @ projection_RK.mT - half_square_BHL1).exp().to(x_BHLK.dtype)

    def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        # Its axes are batch, position, head, width.
        inputs = (make_features(q_BHLK), make_features(k_BHLK), v_BHLC)
        phi_q, phi_k, v = (x.transpose(1, 2) for x in inputs)
        out, _ = package.chunk_linear_attn(phi_q, phi_k, v, scale=1.0, normalize=True)
        return out.transpose(1, 2)

    return attend


def _require_cuda(case: Case) -> None:
    if case.device.type != "cuda":
        raise UnavailableError("needs a CUDA device")


def installed(module: str, target: str = "bench-attention") -> ModuleType:
    """Imports a peer that the target of the Makefile installs.

    Raises:
        UnavailableError: the peer is not installed.
    """
    try:
        with warnings.catch_warnings():
            # performer-pytorch imports names that Python and torch have replaced.
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(f"{error}; `make {target}` installs the peers") from error
