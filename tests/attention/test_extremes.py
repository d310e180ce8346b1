"""Weights that are far from those of random inputs, in mechanisms without a test file."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import create
from tests.attention.truth import HAS_FAR_KEYS

MODES = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """The output without padding."""
    sizes = {"num_heads": q.shape[1], "head_dim": q.shape[3], "model_dim": 16, "max_length": 300}
    mechanism = create(name, {}, **sizes).to(q.dtype)
    mask_BL = torch.ones(len(q), q.shape[2], dtype=torch.bool)
    return mechanism(q, k, v, hidden_BLD=q[:, 0], mask_BL=mask_BL, causal=causal)


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_padded_key_has_no_weight_beside_large_logits(dtype: torch.dtype, causal: bool) -> None:
    softmax = create("softmax", {}, num_heads=1, head_dim=8, model_dim=8, max_length=2)
    q_BHLK = torch.full((1, 1, 2, 8), 100.0, dtype=dtype)
    v_BHLC = torch.tensor([1.0, 2.0], dtype=dtype)[:, None].expand(1, 1, 2, 8)
    rest: Any = {"hidden_BLD": q_BHLK[:, 0], "mask_BL": torch.tensor([[False, True]])}
    out = softmax(q_BHLK, -q_BHLK, v_BHLC, **rest, causal=causal)
    assert out[0, 0, :, 0].tolist() == [0, 2]


@MODES
@pytest.mark.parametrize("shift", [-30.0, 1e3])
def test_small_and_large_keys_of_linear_attention_keep_their_digits(
    shift: float, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    # elu(-30) + 1 is 0 in float32, exp(-30) is not; and exp(1000) would be infinite.
    q, k, v, *_ = make_inputs(70).without_padding()
    k = k.float().double() + shift
    expected = attend("linear", q, k, v, causal=causal)
    found = attend("linear", q.float(), k.float(), v.float(), causal=causal)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@MODES
def test_without_any_weight_outputs_are_0_and_gradients_finite(
    causal: bool, make_inputs: Callable[..., Any]
) -> None:
    inputs = make_inputs(70).without_padding().to(torch.float32)
    # exp(-200) is 0 in float32: no key before the last has weight.
    inputs.k_BHLK[:, :, :-1] -= 200
    inputs = inputs.differentiable()
    out = attend("linear", *inputs[:3], causal=causal)
    last = inputs.v_BHLC[:, :, -1:]
    torch.testing.assert_close(out[:, :, -1:], last)
    others = torch.zeros_like(out) if causal else last.expand_as(out)
    torch.testing.assert_close(out[:, :, :-1], others[:, :, :-1])
    found = torch.autograd.grad(out.sin().sum(), inputs[:3])
    assert all(gradient.isfinite().all() for gradient in found)


@HAS_FAR_KEYS
@MODES
def test_large_queries_and_keys_of_hedgehog_choose_one_key(causal: bool) -> None:
    # exp(500) overflows; the output is that of the key with the largest product of features. Where
    # causal, both large keys are cut at the same height.
    x_BHLK = torch.tensor([1.0, 499.0, 500.0]).reshape(1, 1, 3, 1)
    v_BHLC = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1)
    out = attend("hedgehog", x_BHLK, x_BHLK, v_BHLC, causal=causal)
    last = (2 + 3 * math.e) / (1 + math.e)
    expected = torch.tensor([1.0, 2.0, 2.5] if causal else [last] * 3)
    torch.testing.assert_close(out[0, 0, :, 0], expected, rtol=1e-5, atol=1e-5)


def test_the_matrices_of_hedgehog_have_weight_decay() -> None:
    hedgehog = create("hedgehog", {}, num_heads=2, head_dim=8, model_dim=16, max_length=64)
    assert [name for name, _ in hedgehog.named_parameters()] == list(hedgehog.matrices)
