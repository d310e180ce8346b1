"""The tests that every mechanism must pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import Attention
from protlm.attention.maps import attention_rows

pytestmark = pytest.mark.contract


def gradients(out: Tensor, inputs: Any, mechanism: Attention) -> list[Tensor]:
    """Gradients of q, k, v, the hidden input and the parameters, for a fixed random cotangent."""
    generator = torch.Generator().manual_seed(3)
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    leaves = [*inputs[:4], *mechanism.parameters()]
    found = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The Frobenius norm of the difference over that of the expected."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def map_of(mechanism: Attention, inputs: Any, *, causal: bool, rows: slice | None = None) -> Tensor:
    """The mechanism's map."""
    return mechanism.attention_map(
        inputs.q_BHLK,
        inputs.k_BHLK,
        hidden_BLD=inputs.hidden_BLD,
        mask_BL=inputs.mask_BL,
        causal=causal,
        rows=rows,
    )


def assert_reference(case: Any, causal: bool, length: int, make_inputs: Callable[..., Any]) -> None:
    """Compares the output and every gradient with the O(L²) reference, in float64."""
    mechanism = case.create().double()
    inputs = make_inputs(length).differentiable()
    clean = inputs.with_padding(0.0).differentiable()
    out = inputs.run(mechanism, causal=causal)
    expected = case.expected(mechanism, clean, causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    pairs = zip(
        gradients(out, inputs, mechanism), gradients(expected, clean, mechanism), strict=True
    )
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [1, 64, 65, 257])
def test_output_and_gradients_are_the_reference(
    case: Any, causal: bool, length: int, make_inputs: Callable[..., Any]
) -> None:
    assert_reference(case, causal, length, make_inputs)


@pytest.mark.parametrize("length", [65, 257])
def test_output_and_gradients_of_further_options_are_the_reference(
    further_case: Any, causal: bool, length: int, make_inputs: Callable[..., Any]
) -> None:
    assert_reference(further_case, causal, length, make_inputs)


@pytest.mark.parametrize("length", [65, 130])
def test_reference_without_padding_and_inputs_unchanged(
    case: Any, causal: bool, length: int, make_inputs: Callable[..., Any]
) -> None:
    mechanism = case.create().double()
    inputs = make_inputs(length).without_padding().differentiable()
    before = [x.detach().clone() for x in inputs]
    out = inputs.run(mechanism, causal=causal)
    cotangent = torch.ones_like(out)
    found = torch.autograd.grad(out, inputs[:3], cotangent, materialize_grads=True)
    assert all(torch.equal(one, other) for one, other in zip(before, inputs, strict=True))
    assert cotangent.eq(1).all()
    expected = case.expected(mechanism, inputs, causal=causal)
    wanted = torch.autograd.grad(expected, inputs[:3], cotangent, materialize_grads=True)
    for one, other in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.portable
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 1e-5), pytest.param(torch.bfloat16, 1e-2, marks=pytest.mark.slow)],
    ids=["fp32", "bf16"],
)
def test_errors_are_within_the_bound_of_the_dtype(
    case: Any, causal: bool, dtype: torch.dtype, bound: float, make_inputs: Callable[..., Any]
) -> None:
    mechanism, exact = case.create(), case.create().double()
    inputs = make_inputs(257).to(dtype).differentiable()
    clean = inputs.to(torch.float64).with_padding(0.0).differentiable()
    out = inputs.run(mechanism, causal=causal)
    assert out.dtype == dtype
    expected = case.expected(exact, clean, causal=causal)
    assert relative_error(out, expected) <= bound
    found = gradients(out, inputs, mechanism)
    for one, other in zip(found, gradients(expected, clean, exact), strict=True):
        assert relative_error(one, other) <= bound


@pytest.mark.portable
@pytest.mark.slow
def test_bfloat16_errors_with_further_options_are_within_the_bound(
    further_case: Any, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    mechanism, exact = further_case.create(), further_case.create().double()
    inputs = make_inputs(257).to(torch.bfloat16).differentiable()
    clean = inputs.to(torch.float64).with_padding(0.0).differentiable()
    out = inputs.run(mechanism, causal=causal)
    expected = further_case.expected(exact, clean, causal=causal)
    pairs = zip(
        [out, *gradients(out, inputs, mechanism)],
        [expected, *gradients(expected, clean, exact)],
        strict=True,
    )
    for one, other in pairs:
        assert relative_error(one, other) <= 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_shape_and_dtype_are_those_of_the_values(
    case: Any, causal: bool, dtype: torch.dtype, make_inputs: Callable[..., Any]
) -> None:
    inputs = make_inputs(9)
    inputs = (
        inputs._replace(v_BHLC=inputs.v_BHLC.to(dtype))
        if dtype == torch.float64
        else inputs.to(dtype)
    )
    out = inputs.run(case.create().to(dtype), causal=causal)
    assert out.shape == inputs.v_BHLC.shape
    assert out.dtype == dtype


@pytest.mark.portable
def test_padding_has_no_influence(case: Any, causal: bool, make_inputs: Callable[..., Any]) -> None:
    mechanism = case.create().double()
    results = []
    for value in (torch.nan, torch.inf, 0.0):
        inputs = make_inputs(70).with_padding(value).differentiable()
        out = inputs.run(mechanism, causal=causal)
        results.append([out, *gradients(out, inputs, mechanism)])
    for other in results[:-1]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[-1], strict=True))
    padding_BL = ~make_inputs(70).mask_BL
    for tensor in results[0][:4]:
        assert not tensor.transpose(1, 2)[padding_BL].any()


def test_a_sample_alone_is_as_in_the_batch(
    case: Any, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    mechanism = case.create().double()
    inputs = make_inputs(130).differentiable()
    out = inputs.run(mechanism, causal=causal)
    alone = type(inputs)(*(x[1:2, ..., :65, :] for x in inputs[:4]), inputs.mask_BL[1:2, :65])
    alone = alone.differentiable()
    out_alone = alone.run(mechanism, causal=causal)
    torch.testing.assert_close(out_alone, out[1:2, :, :65], rtol=1e-10, atol=1e-10)
    whole = torch.autograd.grad(out[1:2].square().sum(), inputs[:3], materialize_grads=True)
    parts = torch.autograd.grad(out_alone.square().sum(), alone[:3], materialize_grads=True)
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other[1:2, :, :65], rtol=1e-10, atol=1e-10)


@pytest.mark.portable
def test_samples_do_not_see_each_other(
    case: Any, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    mechanism = case.create()
    first = make_inputs(130).to(torch.float32)
    second = make_inputs(130, seed=9).to(torch.float32)
    mixed = [torch.cat([a[:1], 30 * b[1:]]) for a, b in zip(first[:4], second[:4], strict=True)]
    results = []
    for tensors in (first[:4], mixed):
        inputs = type(first)(*tensors, first.mask_BL).differentiable()
        out = inputs.run(mechanism, causal=causal)
        results.append(
            [out, *torch.autograd.grad(out[0].square().sum(), inputs[:3], materialize_grads=True)]
        )
    for one, other in zip(*results, strict=True):
        assert torch.equal(one[0], other[0])


@pytest.mark.portable
@pytest.mark.parametrize("position", [1, 63, 64, 100, 128, 600])
def test_the_past_does_not_see_the_future(
    causal_case: Any, position: int, make_inputs: Callable[..., Any]
) -> None:
    mechanism = causal_case.create()
    inputs = make_inputs(650).to(torch.float32)
    q_BHLK, k_BHLK, v_BHLC = (x.clone() for x in inputs[:3])
    q_BHLK[:, :, position:] *= -2
    k_BHLK[:, :, position] *= 30
    v_BHLC[:, :, position:] *= 1e4
    before = inputs.run(mechanism, causal=True)
    after = inputs._replace(q_BHLK=q_BHLK, k_BHLK=k_BHLK, v_BHLC=v_BHLC).run(mechanism, causal=True)
    assert torch.equal(before[:, :, :position], after[:, :, :position])
    assert not torch.equal(before, after)


@pytest.mark.parametrize("scale", [1e-3, 8.0, 30.0])
def test_gradients_are_finite(
    case: Any, causal: bool, scale: float, make_inputs: Callable[..., Any]
) -> None:
    inputs = make_inputs(130).to(torch.float32)
    for seed in range(2):
        mechanism = case.create(seed=seed)
        scaled = type(inputs)(*(scale * x for x in inputs[:4]), inputs.mask_BL).differentiable()
        out = scaled.run(mechanism, causal=causal)
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in gradients(out, scaled, mechanism))


def test_autocast_keeps_the_dtype_of_the_values(
    case: Any, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    mechanism = case.create()
    inputs = make_inputs(70).to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = inputs.run(mechanism, causal=causal)
    assert out.dtype == torch.float32
    assert relative_error(out, inputs.run(mechanism, causal=causal)) <= 1e-2


def assert_map(case: Any, causal: bool, length: int, make_inputs: Callable[..., Any]) -> None:
    """Compares the map with the outputs for given values, for maps that are linear in them."""
    mechanism = case.create().double()
    inputs = make_inputs(length)
    whole = map_of(mechanism, inputs, causal=causal)
    clean = inputs.with_padding(0.0)
    if case.reference.is_linear_in_values(case.options):
        identity_LL = torch.eye(length, dtype=torch.float64).expand(3, 2, length, length)
        on_identity = clean._replace(v_BHLC=identity_LL).run(mechanism, causal=causal)
        torch.testing.assert_close(whole, on_identity, rtol=1e-10, atol=1e-10)
        out = clean.run(mechanism, causal=causal)
        torch.testing.assert_close(whole @ clean.v_BHLC, out, rtol=1e-10, atol=1e-10)
    if case.reference.rows_sum_to_one(case.options):
        expected = inputs.mask_BL[:, None].expand(whole.shape[:3]).double()
        torch.testing.assert_close(whole.sum(-1), expected, rtol=1e-10, atol=1e-10)
    assert not whole.transpose(1, 3)[~inputs.mask_BL].any(), "padded keys have weight"


@pytest.mark.parametrize("length", [1, 65, 130])
def test_the_map_is_the_output_on_identity_values(
    case: Any, causal: bool, length: int, make_inputs: Callable[..., Any]
) -> None:
    assert_map(case, causal, length, make_inputs)


def test_the_map_with_further_options_is_the_output_on_identity_values(
    further_case: Any, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    assert_map(further_case, causal, 65, make_inputs)


def test_a_map_is_computed_in_inference_mode(
    case: Any, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    mechanism = case.create().double()
    inputs = make_inputs(20)
    expected = map_of(mechanism, inputs, causal=causal)
    with torch.inference_mode():
        inside = type(inputs)(*(x.clone() for x in inputs))
        found = map_of(mechanism, inside, causal=causal, rows=slice(3, 9))
    torch.testing.assert_close(found, expected[:, :, 3:9], rtol=1e-12, atol=1e-12)


def test_blocks_of_rows_are_the_whole_map(
    case: Any, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    mechanism = case.create().double()
    inputs = make_inputs(130)
    whole = map_of(mechanism, inputs, causal=causal)
    blocks = list(
        attention_rows(
            mechanism,
            inputs.q_BHLK,
            inputs.k_BHLK,
            hidden_BLD=inputs.hidden_BLD,
            mask_BL=inputs.mask_BL,
            causal=causal,
            block=50,
        )
    )
    assert [rows for rows, _ in blocks] == [slice(0, 50), slice(50, 100), slice(100, 130)]
    torch.testing.assert_close(torch.cat([b for _, b in blocks], 2), whole, rtol=1e-12, atol=1e-12)
    last = map_of(mechanism, inputs, causal=causal, rows=slice(-3, None))
    torch.testing.assert_close(last, whole[:, :, -3:], rtol=1e-12, atol=1e-12)


def test_a_state_dict_gives_the_same_mechanism(
    case: Any, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    inputs = make_inputs(9).to(torch.float32)
    one, other = case.create(seed=1), case.create(seed=2)
    other.load_state_dict(one.state_dict())
    assert torch.equal(inputs.run(one, causal=causal), inputs.run(other, causal=causal))
