"""The network of all families in float64, as papers define it: what imported models compute."""

import torch
from torch import Tensor

from tests.interop.families import LAYERS, Example


def published(
    example: Example, weights: dict[str, Tensor], tokens: list[int]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Computes a protein, whose tokens are numbered as in its alphabet.

    Returns:
        The hidden states before and after each block, the maps, and the logits.
    """
    x_LD = _embedded(example, weights, tokens)
    states, maps = [x_LD], []
    # A norm after the last block means that blocks have theirs before their sublayers.
    is_post = "final_norm.weight" not in weights
    divisor = (LAYERS / 36) ** 0.5 if "scaled" in example.traits else 1
    for number in range(LAYERS):
        part = {
            name.removeprefix(f"{number}."): value
            for name, value in weights.items()
            if name.startswith(f"{number}.")
        }
        y_LD = x_LD if is_post else _norm(example, x_LD, part, "norm1")
        y_LD, map_HLL = _attention(example, y_LD, part, weights)
        x_LD = x_LD + y_LD / divisor
        x_LD = _norm(example, x_LD, part, "norm1") if is_post else x_LD
        y_LD = x_LD if is_post else _norm(example, x_LD, part, "norm2")
        up_LF = _linear(y_LD, part, "up")
        is_gated = "gate.weight" in part
        inner_LF = _silu(_linear(y_LD, part, "gate")) * up_LF if is_gated else _gelu(up_LF)
        x_LD = x_LD + _linear(inner_LF, part, "down") / divisor
        x_LD = _norm(example, x_LD, part, "norm2") if is_post else x_LD
        states.append(x_LD)
        maps.append(map_HLL)
    if not is_post:
        x_LD = states[-1] = _norm(example, x_LD, weights, "final_norm")
    if "dense.weight" in weights:
        x_LD = _norm(example, _gelu(_linear(x_LD, weights, "dense")), weights, "head_norm")
    head = {"head.weight": weights["embed.weight"], **weights}
    return states, maps, _linear(x_LD, head, "head")


def _embedded(example: Example, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    x_LD = weights["embed.weight"][tokens]
    if "token_dropout" in example.traits:
        mask = example.alphabet.index(example.special[-1])
        is_mask_L1 = torch.tensor(tokens)[:, None] == mask
        x_LD = x_LD.masked_fill(is_mask_L1, 0) * (1 - 0.15 * 0.8)
        x_LD = x_LD / (1 - is_mask_L1.double().mean())
    if "types.weight" in weights:
        x_LD = x_LD + weights["types.weight"][0]
    if "positions.weight" in weights:
        x_LD = x_LD + weights["positions.weight"][example.first :][: len(tokens)]
    return _norm(example, x_LD, weights, "embed_norm") if "embed_norm.weight" in weights else x_LD


def _attention(
    example: Example, y_LD: Tensor, part: dict[str, Tensor], weights: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    projected = []
    for name in "qkv":
        z_LD = _linear(y_LD, part, name)
        if f"{name}_norm.weight" in part:
            z_LD = _norm(example, z_LD, part, f"{name}_norm")
        projected.append(z_LD.unflatten(-1, (example.heads, -1)).transpose(0, 1))
    q_HLK, k_HLK, v_HLK = projected
    if "positions.weight" not in weights:
        q_HLK, k_HLK = (
            _rotated(
                z_HLK,
                weights.get("rotary.frequency"),
                interleaved="interleaved" in example.traits,
            )
            for z_HLK in (q_HLK, k_HLK)
        )
    map_HLL = (q_HLK @ k_HLK.mT / q_HLK.shape[-1] ** 0.5).softmax(-1)
    return _linear((map_HLL @ v_HLK).transpose(0, 1).flatten(1), part, "o"), map_HLL


def _rotated(x_HLK: Tensor, frequency: Tensor | None, *, interleaved: bool) -> Tensor:
    """Every pair of coordinates is a complex number, multiplied by exp(i p θ^(-2j/K))."""
    width = x_HLK.shape[-1]
    if frequency is None:
        frequency = 10_000.0 ** (-torch.arange(0, width, 2).double() / width)
    angle = torch.outer(torch.arange(x_HLK.shape[1]).double(), frequency.double())
    if interleaved:
        real, imaginary = x_HLK[..., ::2], x_HLK[..., 1::2]
    else:
        real, imaginary = x_HLK[..., : width // 2], x_HLK[..., width // 2 :]
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
    if interleaved:
        return torch.stack([turned.real, turned.imag], -1).flatten(-2)
    return torch.cat([turned.real, turned.imag], -1)


def _norm(example: Example, x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    x = x if "rms" in example.traits else x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]
    return x + weights[f"{name}.bias"] if f"{name}.bias" in weights else x


def _linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.erf(x / 2**0.5))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))
