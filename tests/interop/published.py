"""Layers in float64, as papers define them: what the tests compare imported models with."""

import torch
from torch import Tensor

EPSILON = 1e-5


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    normed = centered / (centered.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight
    return normed if bias is None else normed + bias


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.erf(x / 2**0.5))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def linear(x: Tensor, tensors: dict[str, Tensor], name: str) -> Tensor:
    y = x @ tensors[f"{name}.weight"].T
    return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y


def rotated(x_HLK: Tensor, *, interleaved: bool) -> Tensor:
    """Every pair of coordinates is a complex number, multiplied by exp(i p θ^(-2j/K))."""
    width = x_HLK.shape[-1]
    angle = torch.outer(
        torch.arange(x_HLK.shape[1]).double(),
        10_000.0 ** (-torch.arange(0, width, 2).double() / width),
    )
    if interleaved:
        real, imaginary = x_HLK[..., ::2], x_HLK[..., 1::2]
    else:
        real, imaginary = x_HLK[..., : width // 2], x_HLK[..., width // 2 :]
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
    if interleaved:
        return torch.stack([turned.real, turned.imag], -1).flatten(-2)
    return torch.cat([turned.real, turned.imag], -1)


def heads(x_LD: Tensor, number: int) -> Tensor:
    return x_LD.unflatten(-1, (number, -1)).transpose(0, 1)


def attend(q_HLK: Tensor, k_HLK: Tensor, v_HLC: Tensor) -> tuple[Tensor, Tensor]:
    """The output of all heads side by side, and the maps."""
    map_HLL = (q_HLK @ k_HLK.mT / q_HLK.shape[-1] ** 0.5).softmax(-1)
    return (map_HLL @ v_HLC).transpose(0, 1).flatten(1), map_HLL
