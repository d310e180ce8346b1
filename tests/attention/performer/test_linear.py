"""Linear attention as autograd functions: gradients, dtypes, checkpointing."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from protlm.attention import create
from protlm.attention.base import RandomFeatures
from protlm.attention.performer.positive import PositiveFeatures
from protlm.attention.performer.projection import Projection
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


def test_the_number_of_threads_may_change_before_the_backward_pass(
    performer: Any, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    mechanism, results, threads = performer.create(), [], torch.get_num_threads()
    for change in (0, 1):
        # Long enough for several tiles, whose size depends on the threads.
        inputs = make_inputs(5000).to(torch.float32).differentiable()
        out = inputs.run(mechanism, causal=causal)
        try:
            torch.set_num_threads(threads + change)
            results.append([out, *torch.autograd.grad(out.sin().sum(), inputs[:3])])
        finally:
            torch.set_num_threads(threads)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["performer_softmax", "performer_relu"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_torch_compile_sees_one_graph_with_the_same_result(
    name: str, is_causal: bool, make_inputs: Callable[..., Any]
) -> None:
    sizes = {"num_heads": 2, "head_dim": 8, "model_dim": 16, "max_length": 64}
    mechanism = create(name, {}, **sizes)
    results = []
    for compile_ in (lambda f: f, partial(torch.compile, backend="aot_eager", fullgraph=True)):
        inputs = make_inputs(70).to(torch.float32).differentiable()
        out = compile_(partial(type(inputs).run, causal=is_causal))(inputs, mechanism)
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs[:3])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("head_dim", [128, 256, 512])
@pytest.mark.parametrize("optimal_for", [None, 2.0, 200.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_wide_heads_keep_their_weight_and_gradients(
    head_dim: int, optimal_for: float | None, is_causal: bool, make_inputs: Callable[..., Any]
) -> None:
    sizes = {"num_heads": 2, "head_dim": head_dim, "model_dim": 16, "max_length": 64}
    mechanism = create("performer_softmax", {"optimal_for": optimal_for}, **sizes)
    inputs = make_inputs(70, head_dim=head_dim).without_padding()
    inputs = inputs._replace(q_BHLK=0.1 * inputs.q_BHLK, k_BHLK=0.1 * inputs.k_BHLK)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = inputs.to(dtype).differentiable()
        out = leaves.run(mechanism.to(dtype), causal=is_causal)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves[:3])])
    for found, expected in zip(*results, strict=True):
        assert (found.double() - expected).norm() <= 1e-4 * expected.norm()


def test_a_key_beside_a_row_of_a_wide_head_is_capped_with_no_gradient() -> None:
    rows_RK = Projection(num_features=4, head_dim=256).draw(seed=0, index=0).float()
    # Key features would be exp(128) there.
    k_BHLK = (rows_RK[:1] * 256**0.25)[None, None]
    phi_BHLR, pullback = PositiveFeatures(rows_RK).keys(k_BHLK)
    assert phi_BHLR[0, 0, 0, 0] == pytest.approx(math.exp(60), rel=1e-4)
    assert not pullback(torch.tensor([[[[1.0, 0.0, 0.0, 0.0]]]])).any()


BAD_SETTINGS = {
    "odd pairs": ("performer_softmax", {"antithetic": True, "num_features": 7}, "num_features=7"),
    "odd sines": (
        "performer_softmax",
        {"estimator": "trigonometric", "num_features": 7, "denominator_floor": 1.0},
        "num_features=7 must be an even number",
    ),
    "no guard": ("performer_softmax", {"estimator": "trigonometric"}, "denominator_floor=null"),
    "no use": ("performer_softmax", {"denominator_floor": 1.0}, "denominator_floor=1.0 is for"),
    "pairs of sines": (
        "performer_softmax",
        {"estimator": "trigonometric", "antithetic": True, "denominator_floor": 1.0},
        "antithetic=true does nothing",
    ),
    "OPRF of SMREG": (
        "performer_softmax",
        {"estimator": "regularized", "optimal_for": 2.0},
        "optimal_for=2.0 is for positive features",
    ),
    "OPRF of none": ("performer_softmax", {"optimal_for": 0.0}, "optimal_for=0.0 must be above 0"),
    "OPRF of all": ("performer_softmax", {"optimal_for": 1e9}, "at most 200"),
    "floor and norm": (
        "performer_generalized",
        {"normalizer": "rmsnorm", "denominator_floor": 1.0},
        "denominator_floor=1.0 does nothing",
    ),
    "negative kernel": ("performer_generalized", {"kernel": "tanh"}, "denominator_floor=0.01"),
    "mirrored cosines": (
        "performer_generalized",
        {"kernel": "cos", "antithetic": True, "denominator_floor": 1.0},
        "antithetic=true does nothing",
    ),
    "law of nothing": (
        "performer_generalized",
        {"num_features": None, "projection": "iid"},
        "projection=iid needs a projection",
    ),
    "no kernel": ("performer_generalized", {"kernel": "swish"}, "there are: abs, cos, elu, exp"),
    "negative eps": ("performer_relu", {"kernel_epsilon": -1.0}, "kernel_epsilon=-1.0 must be 0"),
    "no law": ("performer_softmax", {"projection": "random"}, "projection=random does not exist"),
    "hadamard": ("performer_softmax", {"projection": "hadamard"}, "power of two, not 24"),
    "word": ("performer_softmax", {"antithetic": "yes"}, "yes must be true or false"),
}


@pytest.mark.parametrize("case_name", BAD_SETTINGS)
def test_a_bad_setting_is_refused_with_what_to_set(case_name: str) -> None:
    name, options, message = BAD_SETTINGS[case_name]
    sizes = {"num_heads": 2, "head_dim": 24, "model_dim": 48, "max_length": 64}
    with pytest.raises(UserError, match=re.escape(message)) as error:
        create(name, options, **sizes)
    assert str(error.value).startswith("attention.")
