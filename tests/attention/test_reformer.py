"""The Reformer: the paper's sum over rounds, keys, extremes, and its number of buckets."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import create

SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16}
ONE_BUCKET = {"chunk": 300, "num_hashes": 2, "num_buckets": 1}


def mechanism(*, seed: int = 1, max_length: int = 256, **options: Any) -> Any:
    """A small Reformer."""
    return create("reformer", options, **SIZES, max_length=max_length, seed=seed)


def attend(made: Any, q_BHLK: Tensor, v_BHLC: Tensor, *, causal: bool = False) -> Tensor:
    """The output without padding."""
    mask_BL = torch.ones(q_BHLK.shape[0], q_BHLK.shape[2], dtype=torch.bool)
    return made(q_BHLK, q_BHLK, v_BHLC, hidden_BLD=q_BHLK[:, 0], mask_BL=mask_BL, causal=causal)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_keys_that_are_passed_are_not_read(make_inputs: Callable[..., Any]) -> None:
    inputs, made = make_inputs(40), mechanism(chunk=8)
    without_keys = inputs._replace(k_BHLK=torch.full_like(inputs.k_BHLK, torch.nan))
    assert made.shares_query_key
    expected, found = (x.run(made, causal=False) for x in (inputs, without_keys))
    assert torch.equal(found, expected)


def test_a_query_of_zero_has_a_finite_gradient() -> None:
    q_BHLK = normal(1, 2, 20, 8).float()
    q_BHLK[:, :, 3] = 0
    q_BHLK.requires_grad_()
    attend(mechanism(**ONE_BUCKET), q_BHLK, normal(1, 2, 20, 5).float()).square().sum().backward()
    assert q_BHLK.grad is not None
    assert q_BHLK.grad.isfinite().all()


def test_float16_does_not_overflow() -> None:
    q_BHLK, v_BHLC = 30 * normal(1, 2, 130, 8), normal(1, 2, 130, 5)
    made = mechanism(chunk=8)
    out = attend(made, q_BHLK.half(), v_BHLC.half(), causal=True)
    assert out.dtype == torch.float16
    expected = attend(made, q_BHLK.half().double(), v_BHLC.half().double(), causal=True)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("max_length", "chunk", "num_buckets"),
    [(64, 64, 1), (65, 64, 2), (512, 64, 8), (1024, 64, 16), (1000, 64, 14), (3, 1, 2)],
)
def test_there_is_about_one_bucket_for_each_chunk_of_the_longest_input(
    max_length: int, chunk: int, num_buckets: int
) -> None:
    made = mechanism(max_length=max_length, chunk=chunk)
    assert made.num_buckets == num_buckets
    assert made.rotations.shape == (4, 2, 8, (num_buckets + 1) // 2)
