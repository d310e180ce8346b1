"""Recurrent mechanisms: stepping through positions equals the forward pass on the sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention.base import Recurrent
from tests.attention.cases import Inputs, LargestTensor, make_inputs
from tests.marks import slow_but

# The states of all other mechanisms have a constant size.
KEEP_EVERY_POSITION = {"softmax"}


def take(inputs: Inputs, rows: Tensor) -> Inputs:
    return type(inputs)(*(x[rows] for x in inputs))


def steps(
    mechanism: Any, inputs: Inputs, state: Any = None, *, start: int = 0, end: int | None = None
) -> tuple[Any, Tensor]:
    """Steps through positions `start` to `end` - 1: the state after them, and the outputs."""
    assert isinstance(mechanism, Recurrent)
    if state is None:
        state = mechanism.initial_state(inputs.k_BHLK[:, :, 0], inputs.v_BHLC[:, :, 0])
    outs = []
    for position in range(start, inputs.q_BHLK.shape[2] if end is None else end):
        at = (x[:, :, position] for x in inputs[:3])
        state, out_BHC = mechanism.step(state, *at, hidden_BD=inputs.hidden_BLD[:, position])
        outs.append(out_BHC)
    return state, torch.stack(outs, dim=2)


def num_elements(state: Any) -> int:
    """Counts the elements of all tensors of a state, nested ones included."""
    if isinstance(state, Tensor):
        return state.numel()
    return sum(num_elements(part) for part in getattr(state, "__dict__", {}).values())


@pytest.mark.parametrize("length", [1, 64, 65, 257])
def test_steps_are_the_causal_forward(any_recurrent_case, length):
    mechanism = any_recurrent_case.create().double()
    inputs = make_inputs(length).without_padding()
    _, out = steps(mechanism, inputs)
    torch.testing.assert_close(out, inputs.run(mechanism, causal=True), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("split", slow_but([1, 63, 64, 100], 63))
@pytest.mark.portable
def test_samples_of_a_state_continue_separately(recurrent_case, split):
    """Some samples leave, some are duplicated, and one state is continued in two ways."""
    mechanism = recurrent_case.create().double()
    inputs, others = make_inputs(130).without_padding(), make_inputs(130, seed=5).without_padding()
    rows = torch.tensor([2, 0, 2, 2])
    state, _ = steps(mechanism, inputs, end=split)
    fork = state[rows]
    for tensors, way in ((take(others, rows), fork), (inputs, state)):
        # Both ways begin alike and differ from the split on.
        begun = take(inputs, rows) if way is fork else inputs
        joined = [
            torch.cat([a[..., :split, :], b[..., split:, :]], dim=-2)
            for a, b in zip(begun[:4], tensors[:4], strict=True)
        ]
        whole = type(inputs)(*joined, tensors.mask_BL)
        _, out = steps(mechanism, whole, way, start=split)
        expected = whole.run(mechanism, causal=True)[:, :, split:]
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "budget"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"]
)
def test_error_is_within_the_bound_of_the_dtype(recurrent_case, dtype, budget):
    inputs = make_inputs(130).without_padding().to(dtype)
    _, out = steps(recurrent_case.create(), inputs)
    assert out.dtype == dtype
    exact = inputs.to(torch.float64).run(recurrent_case.create().double(), causal=True)
    assert (out.double() - exact).norm() <= budget * exact.norm()


def test_samples_do_not_see_each_other(recurrent_case):
    mechanism = recurrent_case.create()
    first = make_inputs(70).without_padding().to(torch.float32)
    second = make_inputs(70, seed=9).without_padding().to(torch.float32)
    mixed = [torch.cat([a[:1], 30 * b[1:]]) for a, b in zip(first[:4], second[:4], strict=True)]
    _, alike = steps(mechanism, first)
    _, other = steps(mechanism, type(first)(*mixed, first.mask_BL))
    assert torch.equal(alike[0], other[0])
    assert not torch.equal(alike, other)


def test_work_and_memory_do_not_grow_with_the_position(recurrent_case):
    mechanism = recurrent_case.create()
    inputs = make_inputs(300).without_padding().to(torch.float32)
    sizes, largest, state = [], [], None
    for start, end in ((0, 3), (3, 200), (200, 300)):
        state, _ = steps(mechanism, inputs, state, start=start, end=end - 1)
        at = [x[:, :, end - 1].clone() for x in inputs[:3]]
        hidden_BD = inputs.hidden_BLD[:, end - 1].clone()
        with LargestTensor() as tensors:
            state, _ = mechanism.step(state, *at, hidden_BD=hidden_BD)
        sizes.append(num_elements(state))
        largest.append(tensors.numel)
    is_flat = len(set(sizes)) == len(set(largest)) == 1
    assert is_flat != (recurrent_case.name in KEEP_EVERY_POSITION), (sizes, largest)
