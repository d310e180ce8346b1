"""The feed-forward sublayer: its formulas, and its chunks."""

import pytest
import torch
from torch import Tensor

from protlm.config import Activation, TrainConfig
from protlm.config.composition import compose
from protlm.model.block import FeedForward
from protlm.system.errors import UserError

D, WIDTH = 16, 96


def made(activation: Activation, chunk: int | None, dtype: torch.dtype) -> FeedForward:
    torch.manual_seed(0)
    return FeedForward(model_dim=D, feedforward_dim=WIDTH, activation=activation, chunk=chunk).to(
        dtype
    )


def draw(length: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, length, D, generator=generator, dtype=torch.float64).to(dtype)


def by_the_formula(layer: FeedForward, x_BLD: Tensor) -> Tensor:
    up_BLF = x_BLD @ layer.up.weight.mT
    if layer.activation is Activation.swiglu:
        assert layer.gate is not None
        gate_BLF = x_BLD @ layer.gate.weight.mT
        return (gate_BLF * gate_BLF.sigmoid() * up_BLF) @ layer.down.weight.mT
    up_BLF = up_BLF + layer.up.bias
    if layer.activation is Activation.relu:
        active_BLF = up_BLF.clamp(min=0)
    else:
        active_BLF = up_BLF * (1 + torch.erf(up_BLF / 2**0.5)) / 2
    return active_BLF @ layer.down.weight.mT + layer.down.bias


def gradients(out_BLD: Tensor, x_BLD: Tensor, layer: FeedForward) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    weights_BLD = torch.rand(out_BLD.shape, generator=generator, dtype=torch.float64)
    total = (out_BLD * weights_BLD.to(out_BLD.dtype)).sum()
    return torch.autograd.grad(total, (x_BLD, *layer.parameters()))


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("chunk", [None, 1, 7, 8, 64])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 50])
def test_chunks_change_neither_output_nor_gradients(
    activation: Activation, chunk: int | None, length: int
) -> None:
    layer = made(activation, chunk, torch.float64)
    x_BLD = draw(length, torch.float64).requires_grad_()
    out_BLD, expected_BLD = layer(x_BLD), by_the_formula(layer, x_BLD)
    torch.testing.assert_close(out_BLD, expected_BLD, rtol=1e-12, atol=1e-12)
    for found, expected in zip(
        gradients(out_BLD, x_BLD, layer), gradients(expected_BLD, x_BLD, layer), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        assert torch.equal(layer(x_BLD), out_BLD)


@pytest.mark.parametrize("activation", Activation)
def test_chunks_are_as_precise_in_bfloat16(activation: Activation) -> None:
    length, errors = 3000, {}
    exact, x_BLD = made(activation, None, torch.float64), draw(length, torch.float64)
    out_BLD = exact(x_BLD.requires_grad_())
    expected = [out_BLD, *gradients(out_BLD, x_BLD, exact)]
    for chunk in (None, 10):
        layer, x_BLD = made(activation, chunk, torch.float32), draw(length, torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out_BLD = layer(x_BLD.requires_grad_())
        assert out_BLD.dtype is torch.bfloat16
        found = [out_BLD, *gradients(out_BLD, x_BLD, layer)]
        errors[chunk] = [
            float((x.double() - y).detach().norm() / y.detach().norm())
            for x, y in zip(found, expected, strict=True)
        ]
    for chunked, whole in zip(errors[10], errors[None], strict=True):
        assert chunked < 1.2 * whole


@pytest.mark.parametrize("activation", Activation)
def test_no_tensor_has_all_positions_and_the_feedforward_width(
    activation: Activation, make_memory
) -> None:
    chunk, length = 16, 640
    x_BLD = draw(length, torch.float32).requires_grad_()
    whole, chunked = made(activation, None, x_BLD.dtype), made(activation, chunk, x_BLD.dtype)
    with make_memory() as memory:
        out_BLD = whole(x_BLD)
        assert memory.largest == 4 * 3 * length * WIDTH
    with make_memory() as memory:
        out_BLD = chunked(x_BLD)
        # The output is kept, but no copy of the input.
        assert memory.alive == 4 * out_BLD.numel()
        out_BLD.square().sum().backward()
    assert memory.largest == 4 * out_BLD.numel()
    # The output, its gradient, that of the chunks and of the input; a few chunks in full width.
    assert memory.peak < 4 * (5 * out_BLD.numel() + 12 * 3 * chunk * WIDTH)


@pytest.mark.parametrize("chunk", [0, -5])
def test_a_chunk_has_at_least_one_position(chunk: int) -> None:
    with pytest.raises(UserError, match=rf"model\.feedforward_chunk={chunk} must be at least 1"):
        compose(TrainConfig, ["model=tiny", f"model.feedforward_chunk={chunk}"])
