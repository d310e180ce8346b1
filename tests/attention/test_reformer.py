"""The Reformer: the paper's sum over rounds, keys, extremes, and its number of buckets."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import create, reformer

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


@pytest.mark.parametrize("is_causal", [False, True])
def test_rounds_add_up_as_in_the_paper(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ_r exp(z_r - z) o_r, with log N_ij taken off a pair that N_ij rounds have (eq. 6, app. A).

    Not a mean of the rounds, as elsewhere.
    """
    rounds, length = 3, 60
    generator = torch.Generator().manual_seed(0)
    buckets_TL = torch.randint(4, (rounds, length), generator=generator)
    buckets_TBHL = buckets_TL[:, None, None].expand(-1, 2, 2, -1)
    monkeypatch.setattr(reformer, "hash_buckets", lambda *_: buckets_TBHL)
    q_BHLK, v_BHLC = 2 * normal(2, 2, length, 8), normal(2, 2, length, 5, seed=1)
    # No bucket has more than 60: one chunk.
    seen_TLL = buckets_TL[:, :, None] == buckets_TL[:, None]
    if is_causal:
        seen_TLL = seen_TLL.tril()
    seen_TLL &= ~torch.eye(length, dtype=torch.bool)
    count_LL = seen_TLL.sum(dim=0)
    assert count_LL.max() == rounds
    logits_BHLL = q_BHLK @ torch.nn.functional.normalize(q_BHLK, dim=-1).mT - count_LL.log()
    z_TBHL = torch.stack([logits_BHLL.where(seen, -torch.inf).logsumexp(-1) for seen in seen_TLL])
    z_BHL = z_TBHL.logsumexp(dim=0)
    expected = torch.zeros_like(v_BHLC)
    for z_round_BHL, seen_LL in zip(z_TBHL, seen_TLL, strict=True):
        weights_BHLL = (logits_BHLL - z_round_BHL[..., None]).exp().where(seen_LL, 0)
        expected += (z_round_BHL - z_BHL).exp()[..., None] * (weights_BHLL @ v_BHLC)
    has_any_L = count_LL.sum(dim=-1) > 0
    out = attend(mechanism(num_hashes=rounds).double(), q_BHLK, v_BHLC, causal=is_causal)
    torch.testing.assert_close(out[:, :, has_any_L], expected[:, :, has_any_L])


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
