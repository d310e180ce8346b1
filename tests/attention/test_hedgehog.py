"""Hedgehog: its learned matrices, by hand and after training, and large queries and keys."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import create
from protlm.attention.hedgehog import Hedgehog
from protlm.attention.linearized.exponential_pairs import ExponentialPairs
from tests.attention.references import hedgehog as reference


def hedgehog(head_dim: int = 8, *, trained: bool = False) -> Hedgehog:
    """The mechanism for two heads; with `trained`, its matrices are random."""
    sizes = {"num_heads": 2, "head_dim": head_dim, "model_dim": 16, "max_length": 64}
    mechanism = create("hedgehog", {}, **sizes)
    assert isinstance(mechanism, Hedgehog)
    if trained:
        generator = torch.Generator().manual_seed(5)
        for parameter in mechanism.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / head_dim**0.5
    return mechanism.double()


def test_two_keys_by_hand() -> None:
    # With W = 1 the weights of a query x and a key y are exp(x + y) + exp(-x - y).
    x_BHLK = torch.tensor([math.log(2), 0.0], dtype=torch.float64).reshape(1, 1, 2, 1)
    x_BHLK = x_BHLK.repeat(1, 2, 1, 1)
    v_BHLC = torch.tensor([1.0, 10.0], dtype=torch.float64).reshape(1, 1, 2, 1).repeat(1, 2, 1, 1)
    out = hedgehog(1)(
        x_BHLK,
        x_BHLK,
        v_BHLC,
        hidden_BLD=v_BHLC[:, 0],
        mask_BL=torch.ones(1, 2, dtype=torch.bool),
        causal=False,
    )
    # 17/4 and 5/2; 5/2 and 2.
    expected = torch.tensor([(4.25 + 25) / 6.75, (2.5 + 20) / 4.5], dtype=torch.float64)
    torch.testing.assert_close(out[0, 0, :, 0], expected)


@pytest.mark.parametrize("causal", [False, True])
def test_trained_matrices_are_those_of_the_reference(
    causal: bool, make_inputs: Callable[..., Any]
) -> None:
    mechanism = hedgehog(trained=True)
    inputs = make_inputs(70).differentiable()
    clean = inputs.with_padding(0.0).differentiable()
    visible_BLL = inputs.mask_BL[:, :, None] & inputs.mask_BL[:, None, :]
    expected = reference.output(
        mechanism,
        {},
        *clean[:3],
        hidden_BLD=clean.hidden_BLD,
        visible_B1LL=(visible_BLL.tril() if causal else visible_BLL)[:, None],
        causal=causal,
    )
    out = inputs.run(mechanism, causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)

    def gradients(found: Tensor, given: Any) -> tuple[Tensor, ...]:
        leaves = [*given[:3], *mechanism.parameters()]
        return torch.autograd.grad(found.square().sum(), leaves)

    for found, wanted in zip(gradients(out, inputs), gradients(expected, clean), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_the_matrices_have_weight_decay_and_gradients_beside_padding(
    make_inputs: Callable[..., Any],
) -> None:
    mechanism = hedgehog()
    names = [name for name, _ in mechanism.named_parameters()]
    assert names == list(mechanism.matrices)
    inputs = make_inputs(20).differentiable()
    inputs.run(mechanism, causal=False).square().sum().backward()
    for parameter in mechanism.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all() and parameter.grad.any()


@pytest.mark.parametrize("causal", [False, True])
def test_large_queries_and_keys_choose_one_key(causal: bool) -> None:
    # exp(500) overflows; the output is that of the key with the largest product of features.
    x_BHLK = torch.tensor([1.0, 499.0, 500.0]).reshape(1, 1, 3, 1).repeat(1, 2, 1, 1)
    v_BHLC = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1).repeat(1, 2, 1, 1)
    mask_BL = torch.ones(1, 3, dtype=torch.bool)
    mechanism = hedgehog(1).float()
    out = mechanism(x_BHLK, x_BHLK, v_BHLC, hidden_BLD=x_BHLK[:, 0], mask_BL=mask_BL, causal=causal)
    last = (2 + 3 * math.e) / (1 + math.e)
    expected = torch.tensor([1.0, 2.0, last] if causal else [last] * 3)
    torch.testing.assert_close(out[0, 1, :, 0], expected, rtol=1e-5, atol=1e-5)


def test_the_kernel_is_the_mean_over_the_features() -> None:
    x_BHLK = torch.tensor([[[[1.0, -2.0], [0.5, 3.0]]]], dtype=torch.float64)
    pairs = ExponentialPairs()
    phi_q, phi_k = pairs.queries(x_BHLK.clone()).phi_BHLR, pairs.keys(x_BHLK.clone()).phi_BHLR
    kernel = phi_q @ phi_k.mT * pairs.log_factor(x_BHLK).exp()
    sums = x_BHLK[..., :, None, :] + x_BHLK[..., None, :, :]
    torch.testing.assert_close(kernel, sums.cosh().mean(-1))
