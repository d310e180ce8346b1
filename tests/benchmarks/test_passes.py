"""A pass: its two times, the bytes kept for backward, and the peak of what is allocated."""

import pytest
import torch
from torch import Tensor

from benchmarks.cases import HEAD_DIM, NUM_HEADS
from benchmarks.passes import Inputs, Seconds, measured_pass, standard_normal_inputs, timed_pass

LENGTH = 128
VECTORS = LENGTH * NUM_HEADS * HEAD_DIM * 4


@pytest.fixture
def inputs() -> Inputs:
    return standard_normal_inputs(LENGTH, "fp32", torch.device("cpu"))


def scaled(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
    return v_BHLC * 2.0


def product(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
    return q_BHLK * v_BHLC


def same_storage(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
    return v_BHLC.mT.mT * v_BHLC[:, :, :]


def exponential(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
    return v_BHLC.exp()


def wasteful(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
    with torch.no_grad():
        v_BHLC.repeat(5, 1, 1, 1)
    return v_BHLC * 2.0


@pytest.mark.parametrize(
    ("attend", "kept"), [(scaled, 0), (product, 2), (same_storage, 1), (exponential, 1)]
)
def test_kept_counts_every_storage_once(attend, kept: int, inputs: Inputs) -> None:
    _, taken = measured_pass(attend, inputs)
    assert taken.kept == kept * VECTORS


def test_the_peak_sees_what_is_given_back(inputs: Inputs) -> None:
    # The output, and then the gradient of v beside it.
    assert measured_pass(scaled, inputs)[1].peak == pytest.approx(2 * VECTORS, rel=0.01)
    assert measured_pass(wasteful, inputs)[1].peak == pytest.approx(5 * VECTORS, rel=0.01)


def test_a_pass_has_two_times(inputs: Inputs) -> None:
    seconds = timed_pass(product, inputs)
    assert seconds.forward > 0 and seconds.backward > 0
    assert Seconds(forward=1.0, backward=2.0).total == 3.0


def test_inputs_are_reproducible_and_in_their_dtype() -> None:
    first, second = (standard_normal_inputs(8, "bf16", torch.device("cpu")) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert {x.dtype for x in first} == {torch.bfloat16}
    assert [x.requires_grad for x in first] == [True, True, True, False]
