"""The attention-free transformers: their maps, and sums of exponentials that must not vanish."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import Attention
from tests.attention.cases import Case, Inputs, find_case, make_inputs
from tests.rounding import error_bound

MODES = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
LENGTH = 300


def aft(name: str, **options: Any) -> tuple[Case, Attention]:
    """A mechanism whose biases are far from 0, in float64, and its case."""
    defaults = {"aft_full": {"rank": 6}, "aft_local": {"window": 40, "rank": 6}}
    case = find_case(name, **{**defaults.get(name, {}), **options})
    mechanism = case.create(max_length=LENGTH).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in mechanism.parameters():
        parameter.data = 1.5 * torch.randn(parameter.shape, generator=generator).double()
    return case, mechanism


NAMES = pytest.mark.parametrize("name", ["aft_full", "aft_local", "aft_simple", "aft_conv"])


@MODES
@NAMES
def test_the_map_is_the_mean_over_the_channels(name, causal):
    """A value of 1 at one position alone, behind open gates, is the weight of its position."""
    _, mechanism = aft(name)
    inputs = make_inputs(40).without_padding()
    inputs = inputs._replace(q_BHLK=torch.full_like(inputs.q_BHLK, 50.0))
    found = inputs.map_of(mechanism, causal=causal)
    for position in range(40):
        v_BHLC = torch.zeros_like(inputs.v_BHLC)
        v_BHLC[:, :, position] = 1
        out_BHLC = inputs._replace(v_BHLC=v_BHLC).run(mechanism, causal=causal)
        torch.testing.assert_close(found[..., position], out_BHLC.mean(-1).detach())


# Exponents that float32 represents exactly, so that errors come from the sums, not from rounding.
SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "each e^3 times the one before": lambda j: 3.0 * j,
    "each e^3 times less": lambda j: -3.0 * j,
    "the last e^200 times the others": lambda j: 200.0 * (j == j[-1]),
    "every third e^100 times the others": lambda j: 100.0 * (j % 3 == 1),
}


def compared(
    case: Case, mechanism: Attention, inputs: Inputs, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output in float32, and by the reference; outputs are no larger than values."""
    expected = case.expected(mechanism, inputs, causal=causal)
    leaves = inputs.to(torch.float32).differentiable()
    out = leaves.run(mechanism.float(), causal=causal)
    gradients = torch.autograd.grad(out.sum(), [*leaves[:3], *mechanism.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (out.abs().amax(2) <= leaves.v_BHLC.abs().amax(2) * (1 + 1e-5)).all()
    return out.double(), expected


@MODES
@pytest.mark.parametrize("slope", SLOPES)
@NAMES
def test_far_larger_keys_make_no_other_sum_vanish(name, slope, causal):
    """One reference for all positions would leave rows before a large key 0 / 0."""
    inputs = make_inputs(LENGTH).without_padding()
    # The exponent of a convolution is the sum over 8 channels by √8.
    key_L = SLOPES[slope](torch.arange(LENGTH)) / (math.sqrt(8) if name == "aft_conv" else 1)
    k_BHLK = key_L[:, None].float().double().expand_as(inputs.k_BHLK)
    out, expected = compared(*aft(name), inputs._replace(k_BHLK=k_BHLK), causal=causal)
    budget = 1e-5
    if name == "aft_conv":
        # The exponents are sums over 8 channels: their rounding is that of the weights.
        largest = float(SLOPES[slope](torch.arange(LENGTH)).abs().max())
        budget = error_bound(torch.float32, 1 + largest, math.sqrt(8))
    assert (out - expected).norm() <= budget * expected.norm()
    assert (out - expected).abs().amax() <= 10 * budget


@MODES
@pytest.mark.parametrize("name", ["aft_full", "aft_local"])
def test_biases_of_keys_that_a_row_does_not_see_make_no_sum_vanish(name, causal):
    """w_ij = 3j: in a row of the causal form later keys would have the largest weights by far."""
    case, mechanism = aft(name, rank=1)
    u, v = mechanism.parameters()
    u.data = torch.ones(LENGTH, 1).double()
    v.data = 3 * torch.arange(LENGTH, dtype=torch.float64)[:, None]
    inputs = make_inputs(LENGTH).without_padding()
    out, expected = compared(case, mechanism, inputs, causal=causal)
    assert (out - expected).norm() <= 1e-5 * expected.norm()


@MODES
@pytest.mark.parametrize("bias", [-20.0, 20.0])
def test_very_negative_biases_cancel_nothing(bias, causal):
    """Σ e^k + Σ (e^w - 1) e^k, the short formula, loses what e^w leaves of a large near key."""
    case, mechanism = aft("aft_local", window=20, rank=1)
    for parameter, value in zip(mechanism.parameters(), (bias, 1.0), strict=True):
        parameter.data = torch.full_like(parameter, value)
    inputs = make_inputs(100).without_padding()
    inputs.k_BHLK[:, :, 50] += 20
    out, expected = compared(case, mechanism, inputs, causal=causal)
    assert (out - expected).norm() <= 1e-5 * expected.norm()


@MODES
@pytest.mark.parametrize("largest", [-200.0, -88.0, -87.0, -86.0])
def test_a_row_whose_weights_all_vanish_is_zero(largest, causal):
    """Compared with the bias 0 of distant pairs, e^-86 is 0 in float32, but never NaN."""
    _, mechanism = aft("aft_local", window=20, rank=1)
    for parameter, value in zip(mechanism.parameters(), (20.0, largest / 20), strict=True):
        parameter.data = torch.full_like(parameter, value)
    inputs = make_inputs(10).without_padding().to(torch.float32).differentiable()
    out = inputs.run(mechanism.float(), causal=causal)
    assert out.eq(0).all()
    gradients = torch.autograd.grad(out.sum(), [*inputs[:3], *mechanism.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
