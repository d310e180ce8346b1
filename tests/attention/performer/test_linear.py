"""Linear attention as autograd functions: gradients, dtypes, checkpointing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from protlm.attention import create
from protlm.attention.base import RandomFeatures
from protlm.errors import UserError


@pytest.mark.parametrize("length", [3, 66])
def test_gradcheck(
    performer: Any, causal: bool, length: int, make_inputs: Callable[..., Any]
) -> None:
    mechanism = performer.create(head_dim=4).double()
    inputs = make_inputs(length, head_dim=4).with_padding(0.0)
    inputs = type(inputs)(
        *(x[1:, :1] for x in inputs[:3]), inputs.hidden_BLD[1:], inputs.mask_BL[1:]
    )
    leaves = inputs.differentiable()[:3]

    def output(*heads: torch.Tensor) -> torch.Tensor:
        return type(inputs)(*heads, inputs.hidden_BLD, inputs.mask_BL).run(mechanism, causal=causal)

    assert gradcheck(output, leaves, fast_mode=True)


@pytest.mark.parametrize("length", [512, 513, 1100])
def test_blocks_of_rows_join(
    performer: Any, causal: bool, length: int, make_inputs: Callable[..., Any]
) -> None:
    mechanism = performer.create().double()
    inputs = make_inputs(length).with_padding(0.0)
    results = []
    for run in (type(inputs).run, lambda x, m, causal: performer.expected(m, x, causal=causal)):
        leaves = inputs.differentiable()
        out = run(leaves, mechanism, causal=causal)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves[:3])])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_autocast_changes_no_bit(
    performer: Any, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    mechanism = performer.create()
    results = []
    for enabled in (False, True):
        inputs = make_inputs(130).to(torch.float32).differentiable()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = inputs.run(mechanism, causal=causal)
            gradients = torch.autograd.grad(out, inputs[:3], torch.ones_like(out))
            weights = mechanism.attention_map(
                *inputs[:2], hidden_BLD=inputs[3], mask_BL=inputs.mask_BL, causal=causal
            )
        results.append([out, *gradients, weights])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_activation_checkpointing_changes_no_bit(
    performer: Any, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    mechanism = performer.create()
    results = []
    for is_checkpointed in (False, True):
        inputs = make_inputs(70).to(torch.float32).differentiable()

        def output(*heads: torch.Tensor, inputs: Any = inputs) -> torch.Tensor:
            return type(inputs)(*heads, *inputs[3:]).run(mechanism, causal=causal)

        out = (
            checkpoint(output, *inputs[:3], use_reentrant=False)
            if is_checkpointed
            else output(*inputs[:3])
        )
        results.append([out, *torch.autograd.grad(out, inputs[:3], torch.ones_like(out))])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_nan_that_comes_back_for_padding_reaches_nothing(
    performer: Any, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    mechanism = performer.create()
    inputs = make_inputs(70).to(torch.float32).differentiable()
    out = inputs.run(mechanism, causal=causal)
    cotangent = torch.ones_like(out).masked_fill(~inputs.mask_BL[:, None, :, None], torch.nan)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out, inputs[:3], cotangent))


def test_a_second_derivative_is_refused(
    performer: Any, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    inputs = make_inputs(5).differentiable()
    out = inputs.run(performer.create().double(), causal=causal)
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs.q_BHLK, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_redraw_before_the_backward_pass_is_an_error(
    is_causal: bool, make_inputs: Callable[..., Any]
) -> None:
    sizes = {"num_heads": 2, "head_dim": 8, "model_dim": 16, "max_length": 64}
    mechanism = create("performer_softmax", {}, **sizes)
    inputs = make_inputs(5).to(torch.float32).differentiable()
    out = inputs.run(mechanism, causal=is_causal)
    assert isinstance(mechanism, RandomFeatures)
    mechanism.redraw(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_float16_is_refused_with_the_reason(
    performer: Any, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    mechanism, inputs = performer.create(), make_inputs(5).to(torch.float16)
    with pytest.raises(UserError, match=r"range of float16.*bf16"):
        inputs.run(mechanism, causal=causal)
    with pytest.raises(UserError, match=r"range of float16.*bf16"):
        mechanism.attention_map(
            *inputs[:2], hidden_BLD=inputs[3], mask_BL=inputs.mask_BL, causal=causal
        )
