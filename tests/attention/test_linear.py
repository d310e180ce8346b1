"""Linear attention with elu + 1: its features, its sums, and where features vanish."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import Attention, create


def linear(head_dim: int = 8) -> Attention:
    """The mechanism for two heads."""
    return create("linear", {}, num_heads=2, head_dim=head_dim, model_dim=16, max_length=64)


def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, *, causal: bool) -> Tensor:
    """The output without padding."""
    mask_BL = torch.ones(q_BHLK.shape[0], q_BHLK.shape[2], dtype=torch.bool)
    mechanism = linear(q_BHLK.shape[-1])
    return mechanism(
        q_BHLK, k_BHLK, v_BHLC, hidden_BLD=q_BHLK[:, 0], mask_BL=mask_BL, causal=causal
    )


def test_two_keys_by_hand() -> None:
    # φ(q) = (1/2, 2) for both queries; φ(k) = (1, 1/4) and (3, 1): weights 1 and 7/2.
    q = torch.tensor([[math.log(0.5), 1.0]] * 2, dtype=torch.float64)
    k = torch.tensor([[0.0, math.log(0.25)], [2.0, 0.0]], dtype=torch.float64)
    v = torch.tensor([[1.0], [10.0]], dtype=torch.float64)
    q, k, v = (x.expand(1, 2, *x.shape) for x in (q, k, v))
    expected = {False: [8.0, 8.0], True: [1.0, 8.0]}
    for causal, numbers in expected.items():
        out = attend(q, k, v, causal=causal)
        torch.testing.assert_close(out[0, 1, :, 0], torch.tensor(numbers, dtype=torch.float64))


def test_equal_keys_average_the_values(make_inputs: Callable[..., Any]) -> None:
    inputs = make_inputs(130).without_padding()
    equal = inputs.k_BHLK[:, :, :1].expand_as(inputs.k_BHLK)
    counts_L1 = torch.arange(1, 131)[:, None]
    running = inputs.v_BHLC.cumsum(dim=2) / counts_L1
    torch.testing.assert_close(attend(inputs.q_BHLK, equal, inputs.v_BHLC, causal=True), running)
    everywhere = attend(inputs.q_BHLK, equal, inputs.v_BHLC, causal=False)
    torch.testing.assert_close(everywhere, running[:, :, -1:].expand_as(running))


def test_the_last_position_sees_the_same_in_both_modes(make_inputs: Callable[..., Any]) -> None:
    inputs = make_inputs(130).without_padding()
    causal, bidirectional = (attend(*inputs[:3], causal=causal) for causal in (True, False))
    torch.testing.assert_close(causal[:, :, -1], bidirectional[:, :, -1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shift", [-30.0, 1e3])
def test_small_and_large_keys_keep_their_digits(
    causal: bool, shift: float, make_inputs: Callable[..., Any]
) -> None:
    # elu(-30) + 1 is 0 in float32, exp(-30) is not; and exp(1000) would be infinite.
    inputs = make_inputs(70).without_padding()
    k_BHLK = inputs.k_BHLK.float().double() + shift
    expected = attend(inputs.q_BHLK, k_BHLK, inputs.v_BHLC, causal=causal)
    found = attend(*(x.float() for x in (inputs.q_BHLK, k_BHLK, inputs.v_BHLC)), causal=causal)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("causal", [False, True])
def test_without_any_weight_outputs_are_0_and_gradients_finite(
    causal: bool, make_inputs: Callable[..., Any]
) -> None:
    inputs = make_inputs(70).without_padding().to(torch.float32)
    k_BHLK = inputs.k_BHLK.clone()
    # exp(-200) is 0 in float32: no key before the last has weight.
    k_BHLK[:, :, :-1] -= 200
    inputs = inputs._replace(k_BHLK=k_BHLK).differentiable()
    out = attend(*inputs[:3], causal=causal)
    last = inputs.v_BHLC[:, :, -1:]
    torch.testing.assert_close(out[:, :, -1:], last)
    if causal:
        assert not out[:, :, :-1].any()
    else:
        torch.testing.assert_close(out, last.expand_as(out))
    found = torch.autograd.grad(out.sin().sum(), inputs[:3])
    assert all(gradient.isfinite().all() for gradient in found)
