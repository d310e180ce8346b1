"""The tests that every mechanism must pass; recurrent ones step through positions, too."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from protlm.attention import Attention
from protlm.attention.base import Context, RandomFeatures
from protlm.system.errors import UserError
from tests.attention.cases import (
    HAS_FAR_KEYS,
    Case,
    Inputs,
    LargestTensor,
    make_inputs,
    num_elements,
)
from tests.marks import slow_but

pytestmark = pytest.mark.contract


def gradients(out: Tensor, inputs: Inputs, mechanism: Attention) -> list[Tensor]:
    """Gradients of q, k, v, the hidden input and the parameters, for a fixed random cotangent."""
    generator = torch.Generator().manual_seed(3)
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    leaves = [*inputs[:4], *mechanism.parameters()]
    found = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def assert_reference(case: Case, causal: bool, inputs: Inputs) -> None:
    mechanism = case.create().double()
    before, inputs = inputs, inputs.differentiable()
    out = inputs.run(mechanism, causal=causal)
    expected = case.expected(mechanism, inputs, causal=causal)
    results = ([x, *gradients(x, inputs, mechanism)] for x in (out, expected))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(before, inputs, rtol=0, atol=0, equal_nan=True)


def errors(case: Case, causal: bool, inputs: Inputs) -> list[float]:
    """The relative errors of the output and every gradient, to the reference in float64."""
    mechanism, exact = case.create(), case.create().double()
    inputs = inputs.differentiable()
    clean = inputs.to(torch.float64).differentiable()
    out, expected = inputs.run(mechanism, causal=causal), case.expected(exact, clean, causal=causal)
    assert out.dtype == inputs.v_BHLC.dtype
    found = [out, *gradients(out, inputs, mechanism)]
    wanted = [expected, *gradients(expected, clean, exact)]
    return [relative_error(x, y) for x, y in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("length", slow_but([1, 64, 65], 65))
def test_output_and_gradients_are_the_reference(any_case, causal, length):
    assert_reference(any_case, causal, make_inputs(length))


def test_output_and_gradients_without_padding_are_the_reference(case, causal):
    assert_reference(case, causal, make_inputs(130).without_padding())


@pytest.mark.portable
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 1e-5), pytest.param(torch.bfloat16, 1e-2, marks=pytest.mark.slow)],
    ids=["fp32", "bf16"],
)
def test_errors_are_within_the_bound_of_the_dtype(any_case, causal, dtype, bound):
    assert max(errors(any_case, causal, make_inputs(257).to(dtype))) <= bound


def test_a_mechanism_in_bfloat16_has_the_shape_and_the_dtype_of_the_values(case, causal):
    inputs = make_inputs(9).to(torch.bfloat16)
    out = inputs.run(case.create().to(torch.bfloat16), causal=causal)
    assert (out.shape, out.dtype) == (inputs.v_BHLC.shape, torch.bfloat16)


@pytest.mark.portable
def test_padding_has_no_influence(case, causal):
    mechanism = case.create().double()
    results = []
    for value in (torch.nan, torch.inf, 0.0):
        inputs = make_inputs(70).with_padding(value).differentiable()
        out = inputs.run(mechanism, causal=causal)
        results.append([out, *gradients(out, inputs, mechanism)])
    torch.testing.assert_close(results[:-1], [results[-1]] * 2, rtol=0, atol=0)
    padding_BL = ~make_inputs(70).mask_BL
    for tensor in results[0][:4]:
        assert not tensor.transpose(1, 2)[padding_BL].any()


def test_a_sample_alone_is_as_in_the_batch(case, causal):
    mechanism = case.create().double()
    inputs = make_inputs(130).differentiable()
    out = inputs.run(mechanism, causal=causal)
    alone = Inputs(*(x[1:2, ..., :65, :] for x in inputs[:4]), inputs.mask_BL[1:2, :65])
    alone = alone.differentiable()
    out_alone = alone.run(mechanism, causal=causal)
    whole = torch.autograd.grad(out[1:2].square().sum(), inputs[:3], materialize_grads=True)
    parts = torch.autograd.grad(out_alone.square().sum(), alone[:3], materialize_grads=True)
    expected = [x[1:2, :, :65] for x in (out, *whole)]
    torch.testing.assert_close([out_alone, *parts], expected, rtol=1e-10, atol=1e-10)


def alike_in_one_sample(first: Inputs, second: Inputs) -> tuple[Inputs, Inputs]:
    """In float32; all samples but the first one are those of the other inputs, 30 times."""
    first, second = first.to(torch.float32), second.to(torch.float32)
    mixed = [torch.cat([a[:1], 30 * b[1:]]) for a, b in zip(first[:4], second[:4], strict=True)]
    return first, Inputs(*mixed, first.mask_BL)


@HAS_FAR_KEYS
@pytest.mark.portable
def test_samples_do_not_see_each_other(case, causal):
    mechanism, results = case.create(), []
    for given in alike_in_one_sample(make_inputs(130), make_inputs(130, seed=9)):
        inputs = given.differentiable()
        out = inputs.run(mechanism, causal=causal)
        total = out[0].square().sum()
        found = (out, *torch.autograd.grad(total, inputs[:3], materialize_grads=True))
        results.append([x[0] for x in found])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@HAS_FAR_KEYS
@pytest.mark.portable
@pytest.mark.parametrize("position", slow_but([1, 63, 64, 600], 64))
def test_the_past_does_not_see_the_future(causal_case, position):
    mechanism = causal_case.create()
    inputs = make_inputs(650).to(torch.float32)
    changed = Inputs(*(x.clone() for x in inputs))
    changed.q_BHLK[:, :, position:] *= -2
    changed.k_BHLK[:, :, position] *= 30
    changed.v_BHLC[:, :, position:] *= 1e4
    changed.hidden_BLD[:, position:] *= -30
    before, after = (x.run(mechanism, causal=True) for x in (inputs, changed))
    assert torch.equal(before[:, :, :position], after[:, :, :position])
    assert not torch.equal(before, after)


@HAS_FAR_KEYS
@pytest.mark.parametrize("scale", slow_but([1e-3, 30.0], 30.0))
def test_gradients_are_finite(case, causal, scale):
    """Those of queries and keys of 0, and of keys next to 0, too."""
    inputs = make_inputs(130).to(torch.float32)
    for x in inputs[:2]:
        x[:, :, 3] = 0
    inputs.k_BHLK[:, :, 5] *= 1e-30
    for seed in range(2):
        mechanism = case.create(seed=seed)
        scaled = Inputs(*(scale * x for x in inputs[:4]), inputs.mask_BL).differentiable()
        out = scaled.run(mechanism, causal=causal)
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in gradients(out, scaled, mechanism))


def test_checkpointing_and_autocast_change_no_bit(case, causal):
    mechanism = case.create()
    results = []
    for is_special in (False, True):
        inputs = make_inputs(70).to(torch.float32).differentiable()

        def output(*tensors: Tensor, inputs: Inputs = inputs) -> Tensor:
            return Inputs(*tensors, inputs.mask_BL).run(mechanism, causal=causal)

        with torch.autocast("cpu", torch.bfloat16, enabled=is_special):
            run = partial(checkpoint, output, use_reentrant=False) if is_special else output
            out = run(*inputs[:4])
        assert out.dtype == torch.float32
        results.append([out, *gradients(out, inputs, mechanism)])
    for one, other in zip(*results, strict=True):
        if mechanism.rounded_by_autocast:
            assert relative_error(one, other) <= 2e-2
        else:
            assert torch.equal(one, other)


def test_queries_and_values_may_differ_in_dtype_under_autocast(case, causal):
    """Norms leave queries and keys in float32, while values are in bfloat16."""
    mechanism = case.create()
    inputs = make_inputs(65).to(torch.float32)
    exact = inputs.differentiable()
    mixed = inputs._replace(v_BHLC=inputs.v_BHLC.bfloat16()).differentiable()
    with torch.autocast("cpu", torch.bfloat16):
        out = mixed.run(mechanism, causal=causal)
    assert out.dtype == torch.bfloat16
    expected = exact.run(mechanism, causal=causal)
    found, wanted = (gradients(out, mixed, mechanism), gradients(expected, exact, mechanism))
    for one, other in zip([out, *found[:3]], [expected, *wanted[:3]], strict=True):
        assert relative_error(one, other) <= 2e-2


def test_no_global_generator_is_used(case, causal):
    """Hugging Face's BigBird reseeds NumPy in every forward pass of training."""
    mechanism, inputs = case.create(), make_inputs(20).to(torch.float32)
    before = torch.get_rng_state(), str(np.random.get_state())
    assert torch.equal(inputs.run(mechanism, causal=causal), inputs.run(mechanism, causal=causal))
    for module in mechanism.modules():
        if isinstance(module, RandomFeatures):
            module.redraw(1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert str(np.random.get_state()) == before[1]


def test_a_redraw_is_a_pure_function_of_seed_and_index_in_place(case):
    def drawn(mechanism: Attention) -> list[tuple[RandomFeatures, dict[str, Tensor]]]:
        modules = [x for x in mechanism.modules() if isinstance(x, RandomFeatures)]
        return [(x, dict(x.named_buffers(recurse=False))) for x in modules]

    found = [drawn(case.create(seed=seed)) for seed in (1, 1, 2)]
    for (one, buffers), (other, same), (_, of_another_seed) in zip(*found, strict=True):
        first = {name: x.clone() for name, x in buffers.items()}
        one.redraw(3)
        for index in (5, 3):
            other.redraw(index)
        for name, x in buffers.items():
            assert x.data_ptr() == dict(one.named_buffers())[name].data_ptr()
            assert torch.equal(x, same[name])
            assert not torch.equal(x, first[name])
            assert name == "redraw_index" or not torch.equal(first[name], of_another_seed[name])
        one.redraw(0)
        assert all(torch.equal(x, first[name]) for name, x in buffers.items())


def test_more_positions_than_tables_are_refused(case, causal):
    mechanism, longer = case.create(max_length=40).double(), make_inputs(41)
    assert make_inputs(40).run(mechanism, causal=causal).isfinite().all()
    if mechanism.max_length is None:
        longer.run(mechanism, causal=causal)
        return
    for refused in (longer.run, longer.map_of):
        with pytest.raises(UserError, match="41 positions exceed the 40"):
            refused(mechanism, causal=causal)


@pytest.mark.parametrize("length", slow_but([1, 130], 130))
def test_the_map_is_the_output_on_identity_values(any_case, causal, length):
    """For maps that are linear in the values; whatever is at padding."""
    case, mechanism = any_case, any_case.create().double()
    inputs = make_inputs(length)
    whole = inputs.map_of(mechanism, causal=causal)
    clean = inputs.with_padding(0.0)
    if case.reference.linear(case.options):
        identity_LL = torch.eye(length, dtype=torch.float64).expand(3, 2, length, length)
        on_identity = clean._replace(v_BHLC=identity_LL).run(mechanism, causal=causal)
        torch.testing.assert_close(whole, on_identity, rtol=1e-10, atol=1e-10)
        out = clean.run(mechanism, causal=causal)
        torch.testing.assert_close(whole @ clean.v_BHLC, out, rtol=1e-10, atol=1e-10)
    if case.reference.sums_to_one(case.options):
        expected = inputs.mask_BL[:, None].expand(whole.shape[:3]).double()
        torch.testing.assert_close(whole.sum(-1), expected, rtol=1e-10, atol=1e-10)
    assert not whole.transpose(1, 3)[~inputs.mask_BL].any(), "padded keys have weight"


def test_blocks_of_rows_are_the_whole_map_and_in_inference_mode(case, causal):
    mechanism = case.create().double()
    inputs = make_inputs(130)
    whole = inputs.map_of(mechanism, causal=causal)
    with torch.inference_mode():
        inside = Inputs(*(x.clone() for x in inputs))
        rows = (slice(0, 50), slice(50, 100), slice(100, 130))
        blocks = [inside.map_of(mechanism, causal=causal, rows=some) for some in rows]
    torch.testing.assert_close(torch.cat(blocks, 2), whole, rtol=1e-12, atol=1e-12)
    last = inputs.map_of(mechanism, causal=causal, rows=slice(-3, None))
    torch.testing.assert_close(last, whole[:, :, -3:], rtol=1e-12, atol=1e-12)


def test_a_state_dict_gives_the_same_mechanism(case, causal):
    inputs = make_inputs(9).to(torch.float32)
    one, other = case.create(seed=1), case.create(seed=2)
    other.load_state_dict(one.state_dict())
    assert torch.equal(inputs.run(one, causal=causal), inputs.run(other, causal=causal))


def context_at(inputs: Inputs, position: int) -> Context:
    hidden_B1D = inputs.hidden_BLD[:, position : position + 1].clone()
    return Context(hidden_B1D, inputs.mask_BL[:, position : position + 1], causal=True)


def steps(
    mechanism: Any, inputs: Inputs, state: Any = None, *, start: int = 0, end: int | None = None
) -> tuple[Any, Tensor]:
    """Steps through positions `start` to `end` - 1: the state after them, and the outputs."""
    if state is None:
        state = mechanism.initial_state(inputs.k_BHLK[:, :, 0], inputs.v_BHLC[:, :, 0])
    outs = []
    for position in range(start, inputs.q_BHLK.shape[2] if end is None else end):
        at = (x[:, :, position] for x in inputs[:3])
        state, out_BHC = mechanism.step(state, *at, context_at(inputs, position))
        outs.append(out_BHC)
    return state, torch.stack(outs, dim=2)


@pytest.mark.parametrize("length", slow_but([1, 65], 65))
def test_steps_are_the_causal_forward(any_recurrent_case, length):
    mechanism = any_recurrent_case.create().double()
    inputs = make_inputs(length).without_padding()
    _, out = steps(mechanism, inputs)
    torch.testing.assert_close(out, inputs.run(mechanism, causal=True), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("split", slow_but([1, 64], 64))
@pytest.mark.portable
def test_samples_of_a_state_continue_separately(recurrent_case, split):
    """Some samples leave, some are duplicated, and one state is continued in two ways."""
    mechanism = recurrent_case.create().double()
    inputs, others = make_inputs(130).without_padding(), make_inputs(130, seed=5).without_padding()
    rows = torch.tensor([2, 0, 2, 2])
    state, _ = steps(mechanism, inputs, end=split)
    fork = state[rows]
    for tensors, way in ((Inputs(*(x[rows] for x in others)), fork), (inputs, state)):
        # Both ways begin alike and differ from the split on.
        begun = Inputs(*(x[rows] for x in inputs)) if way is fork else inputs
        joined = [
            torch.cat([a[..., :split, :], b[..., split:, :]], dim=-2)
            for a, b in zip(begun[:4], tensors[:4], strict=True)
        ]
        whole = Inputs(*joined, tensors.mask_BL)
        _, out = steps(mechanism, whole, way, start=split)
        expected = whole.run(mechanism, causal=True)[:, :, split:]
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.portable
@pytest.mark.parametrize(
    ("dtype", "budget"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"]
)
def test_errors_of_steps_are_within_the_bound_of_the_dtype(recurrent_case, dtype, budget):
    inputs = make_inputs(130).without_padding().to(dtype)
    _, out = steps(recurrent_case.create(), inputs)
    assert out.dtype == dtype
    exact = inputs.to(torch.float64).run(recurrent_case.create().double(), causal=True)
    assert (out.double() - exact).norm() <= budget * exact.norm()


@pytest.mark.portable
def test_samples_of_a_step_do_not_see_each_other(recurrent_case):
    mechanism = recurrent_case.create()
    whole = (make_inputs(70, seed=seed).without_padding() for seed in (0, 9))
    alike, other = (steps(mechanism, inputs)[1] for inputs in alike_in_one_sample(*whole))
    assert torch.equal(alike[0], other[0])
    assert not torch.equal(alike, other)


def test_work_and_memory_do_not_grow_with_the_position(recurrent_case):
    mechanism = recurrent_case.create()
    inputs = make_inputs(300).without_padding().to(torch.float32)
    sizes, largest, state = [], [], None
    for start, end in ((0, 3), (3, 200), (200, 300)):
        state, _ = steps(mechanism, inputs, state, start=start, end=end - 1)
        at = [x[:, :, end - 1].clone() for x in inputs[:3]]
        context = context_at(inputs, end - 1)
        with LargestTensor() as tensors:
            state, _ = mechanism.step(state, *at, context)
        sizes.append(num_elements(state))
        largest.append(tensors.numel)
    is_flat = len(set(sizes)) == len(set(largest)) == 1
    # All states but that of softmax have a constant size.
    assert is_flat != (recurrent_case.name == "softmax"), (sizes, largest)
