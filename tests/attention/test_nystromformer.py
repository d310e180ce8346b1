"""Nyströmformer: its pseudo-inverse, segments and convolution."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from protlm.attention import create
from protlm.attention.nystromformer import convolved, pseudo_inverse
from tests.rounding import condition_of, error_bound

SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16}


def test_the_iteration_is_of_order_three() -> None:
    """With R = 1 - A Z its polynomial is R ← ¾ R³ + ¼ R⁴."""
    a = torch.randn(3, 2, 12, 12, dtype=torch.float64).softmax(-1)
    one = torch.eye(12, dtype=torch.float64)
    for number in range(8):
        residual = one - a @ pseudo_inverse(a, number)
        cube = residual @ residual @ residual
        expected = 3 / 4 * cube + 1 / 4 * cube @ residual
        after = one - a @ pseudo_inverse(a, number + 1)
        torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-9)


def test_an_inverse_near_its_limit_keeps_the_precision_of_float32() -> None:
    """Near the inverse, errors are amplified; in float32 they would be 2e-5."""
    generator = torch.Generator().manual_seed(0)
    # Alike within 32 positions, so that the landmarks are not means of noise.
    shape = (3, 1, 4, 512 // 32, 64)
    alike = 2 * torch.randn(shape, generator=generator).repeat_interleave(32, dim=3)
    q, k, v = alike + torch.randn(alike.shape, generator=generator)
    options = {"num_iterations": 12, "conv_kernel": None}
    ours = create("nystromformer", options, num_heads=4, head_dim=64, model_dim=256, max_length=1)
    rest: Any = {"hidden_BLD": q[:, 0], "mask_BL": torch.ones(1, 512, dtype=torch.bool)}

    def output(*heads: torch.Tensor) -> list[torch.Tensor]:
        return [ours(*heads, **rest, causal=False)]

    operands = [x.double() for x in (q, k, v)]
    (exact,), (condition,) = output(*operands), condition_of(output, operands)
    # 1.4e-5: logits are sums over 64 coordinates.
    bound = error_bound(torch.float32, condition, math.sqrt(64))
    assert (output(q, k, v)[0] - exact).norm() <= bound * exact.norm()


@pytest.mark.parametrize("width", [1, 3, 35, 65, 201])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_the_convolution_is_that_of_torch(width: int, length: int) -> None:
    v = torch.randn(2, 3, length, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, width, dtype=torch.float64, requires_grad=True)
    expected = F.conv2d(v, weight[:, None, :, None], padding=(width // 2, 0), groups=3)
    out = convolved(v, weight)
    torch.testing.assert_close(out, expected)
    cotangent = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, (v, weight), cotangent)
    for one, other in zip(torch.autograd.grad(out, (v, weight), cotangent), wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("width", [33, 35, 65])
def test_a_wide_kernel_has_its_gradient_in_float32(width: int) -> None:
    """The gradient of torch's own convolution misses it by 5 % and more on some CPUs."""
    v = torch.randn(1, 8, 512, 64)
    weight = torch.randn(8, width)
    cotangent = torch.randn_like(v)
    found, exact = (
        torch.autograd.grad(convolved(v.to(dtype), leaf), leaf, cotangent.to(dtype))[0]
        for dtype in (torch.float32, torch.float64)
        for leaf in [weight.to(dtype).requires_grad_()]
    )
    assert (found - exact).norm() <= 1e-5 * exact.norm()


def test_the_kernel_starts_like_those_of_torch() -> None:
    torch.manual_seed(0)
    options = {"conv_kernel": 9999}
    many: Any = create("nystromformer", options, **{**SIZES, "num_heads": 10}, max_length=1)
    drawn = many.conv_weight.detach() * 9999**0.5
    assert 0.99 < drawn.abs().max() <= 1
    # 99,990 draws from a uniform distribution: four standard errors.
    assert abs(drawn.mean()) < 4 * (1 / 3 / 99_990) ** 0.5
    assert abs(drawn.square().mean() - 1 / 3) < 4 * (4 / 45 / 99_990) ** 0.5
