"""Blocks, margins and windows, compared with loops; random blocks: legal, and each as likely."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.ops.block_sparse import FixedBlocks, draw_blocks, hash_keys, random_subsets
from protlm.attention.ops.blocks import SharedKeys, Window, softmax_in_blocks, window_softmax


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax over what is visible, 0 where nothing is."""
    weights = (q @ k.mT / q.shape[-1] ** 0.5).exp() * visible
    totals = weights.sum(-1, keepdim=True)
    return weights / (totals + (totals == 0)) @ v


@pytest.mark.parametrize("mask_heads", [1, 2])
@pytest.mark.parametrize(("key_width", "value_width"), [(8, 8), (5, 5), (3, 9), (9, 3)])
def test_softmax_in_blocks_is_softmax_in_each(mask_heads, key_width, value_width):
    q, k, v = draw(3, 2, 4, 6, key_width), draw(3, 2, 4, 11, key_width, seed=1), None
    v = draw(3, 2, 4, 11, value_width, seed=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    visible = draw(3, mask_heads, 4, 6, 11, seed=3) > 0
    visible[0, :, 1, 2] = False
    visible[2] = False
    found, expected = softmax_in_blocks(q, k, v, visible), dense(q, k, v, visible)
    assert found[2].eq(0).all() and found[0, :, 1, 2].eq(0).all()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    cotangent = draw(*found.shape, seed=4)
    pairs = zip(
        torch.autograd.grad(found, leaves, cotangent),
        torch.autograd.grad(expected, leaves, cotangent),
        strict=True,
    )
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_a_kernel_whose_first_keys_are_masked_is_correct():
    """Fused kernels take 512 keys at a time: the first of them are hidden here."""
    q, k, v = draw(1, 2, 1, 6, 8), draw(1, 2, 1, 1100, 8, seed=1), draw(1, 2, 1, 1100, 8, seed=2)
    visible = torch.arange(1100).expand(1, 1, 1, 6, 1100) >= 1050
    found = softmax_in_blocks(q.float(), k.float(), v.float(), visible)
    expected = F.scaled_dot_product_attention(q, k[:, :, :, 1050:], v[:, :, :, 1050:])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


WINDOWS = [
    Window(0, 0),
    Window(1, 0),
    Window(0, 3),
    Window(8, 8),
    Window(70, 70),
    Window(130, 0),
    Window(33, 90),
    Window(1000, 1000),
    Window(4, 4, dilation=3),
    Window(20, 0, dilation=2),
    Window(2, 2, dilation=100),
]


def band(length: int, window: Window) -> Tensor:
    """Which of the positions sees which, one pair after the other."""
    seen = {window.dilation * step for step in range(-window.before, window.after + 1)}
    return torch.tensor([[j - i in seen for j in range(length)] for i in range(length)])


@pytest.mark.parametrize("window", WINDOWS, ids=repr)
@pytest.mark.parametrize("length", [1, 2, 65, 300])
@pytest.mark.parametrize("num_shared", [0, 3])
def test_it_is_softmax_with_a_band_for_a_mask(window, length, num_shared):
    q, k, v = (draw(2, 2, length, 8, seed=seed).requires_grad_() for seed in range(3))
    keys_BL = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < 0.8
    visible = band(length, window) & keys_BL[:, None, None]
    shared_k, shared_v = (draw(2, 2, num_shared, 8, seed=5 + s).requires_grad_() for s in range(2))
    generator = torch.Generator().manual_seed(2)
    visible_BLP = torch.rand(2, length, num_shared, generator=generator) < 0.5
    found = window_softmax(
        *(q, k, v),
        keys_BL=keys_BL,
        window=window,
        shared=SharedKeys(shared_k, shared_v, visible_BLP) if num_shared else None,
    )
    expected = dense(
        q,
        torch.cat([k, shared_k], dim=2),
        torch.cat([v, shared_v], dim=2),
        torch.cat([visible, visible_BLP[:, None]], dim=3),
    )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    cotangent = draw(*found.shape, seed=9)
    leaves = [q, k, v, shared_k, shared_v][: 5 if num_shared else 3]
    pairs = zip(
        torch.autograd.grad(found, leaves, cotangent),
        torch.autograd.grad(expected, leaves, cotangent),
        strict=True,
    )
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


def chi_square(counts: Tensor) -> float:
    """The deviation of counts from their mean, in standard deviations of what chance does."""
    expected = counts.double().mean()
    square = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.numel() - 1
    return float((square - freedom) / (2 * freedom) ** 0.5)


def test_every_subset_is_as_likely_as_any_other():
    """Of 7 candidates 3 are drawn: 35 subsets; consecutive keys are the worst ones."""
    drawn = random_subsets(torch.arange(70_000), torch.tensor(7), 3)
    subsets, counts = drawn.sort(dim=-1).values.unique(dim=0, return_counts=True)
    assert len(subsets) == 35
    assert abs(chi_square(counts)) < 4


def drawn_blocks(num_blocks: list[int], fixed: FixedBlocks, size: int, *, seed: int = 0) -> Tensor:
    """Draws blocks for three heads, in sequences of the given numbers of blocks."""
    num_blocks_BS = torch.tensor(num_blocks)[:, None].expand(-1, max(num_blocks))
    return draw_blocks(hash_keys(seed, 3), num_blocks_BS, fixed, size)


def test_random_blocks_come_from_everywhere_alike():
    """Of 40 blocks, a row in the middle draws each legal one as often as any other."""
    fixed, num_blocks_BS = FixedBlocks(1, 1, 1, 1), torch.full((1, 40), 40)
    drawn = draw_blocks(hash_keys(0, 4000), num_blocks_BS, fixed, 3)[0, :, 17]
    counts = drawn.flatten().bincount(minlength=40)
    legal = [block for block in range(1, 39) if abs(block - 17) > 1]
    assert counts.sum() == counts[legal].sum() == 12_000
    assert abs(chi_square(counts[legal])) < 4


def test_heads_seeds_rows_and_lengths_draw_differently():
    fixed = FixedBlocks(0, 0, 0, 0)
    one, other = (drawn_blocks([400, 399], fixed, 2, seed=seed) for seed in (0, 1))
    assert torch.equal(one, drawn_blocks([400, 399], fixed, 2))
    pairs = [
        (one, other),
        (one[:, 0], one[:, 1]),
        (one[0], one[1]),
        (one[:, :, 1:], one[:, :, :-1]),
    ]
    for first, second in pairs:
        assert (first == second).double().mean() < 0.02
