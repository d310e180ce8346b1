"""Blocks, margins, and softmax within blocks, compared with loops and dense matrices."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.ops.blocks import (
    from_blocks,
    softmax_in_blocks,
    to_blocks,
    with_margins,
    with_neighbors,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 3, 8, 100])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 65])
def test_blocks_end_to_end_are_the_sequence(length: int, size: int) -> None:
    x = draw(2, 3, length, 4)
    blocks = to_blocks(x, size, value=5.0)
    assert blocks.shape == (2, 3, -(-length // size), size, 4)
    assert torch.equal(from_blocks(blocks, length), x)
    assert from_blocks(blocks, blocks.shape[2] * size)[:, :, length:].eq(5).all()


def loop_of_margins(x: Tensor, size: int, before: int, after: int) -> Tensor:
    """Every block's positions, one by one."""
    number = x.shape[2] // size
    zero = torch.zeros_like(x[:, :, 0])
    rows = [
        [
            x[:, :, p] if 0 <= p < x.shape[2] else zero
            for p in range(s * size - before, (s + 1) * size + after)
        ]
        for s in range(number)
    ]
    return torch.stack([torch.stack(row, dim=2) for row in rows], dim=2)


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize(
    ("before", "after"), [(0, 0), (3, 0), (0, 5), (4, 4), (1, 7), (8, 3), (9, 12), (40, 0)]
)
def test_margins_are_the_positions_on_either_side(number: int, before: int, after: int) -> None:
    size = 4
    x = draw(2, 3, number * size, 2).requires_grad_()
    found = with_margins(x.unflatten(2, (number, size)), before=before, after=after)
    expected = loop_of_margins(x, size, before, after)
    assert torch.equal(found, expected)
    cotangent = draw(*expected.shape, seed=1)
    (got,) = torch.autograd.grad(found, x, cotangent)
    (wanted,) = torch.autograd.grad(expected, x, cotangent)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 1), (2, 0), (0, 3)])
def test_neighbors_are_margins_of_whole_blocks(before: int, after: int) -> None:
    x = draw(2, 3, 4, 5, 2)
    found = with_neighbors(x, before=before, after=after)
    assert found.shape == (2, 3, 4, 5 * (before + 1 + after), 2)
    assert torch.equal(found, loop_of_margins(x.flatten(2, 3), 5, 5 * before, 5 * after))


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax over what is visible, 0 where nothing is."""
    weights = (q @ k.mT / q.shape[-1] ** 0.5).exp() * visible
    totals = weights.sum(-1, keepdim=True)
    return weights / (totals + (totals == 0)) @ v


@pytest.mark.parametrize("mask_heads", [1, 2])
@pytest.mark.parametrize(("key_width", "value_width"), [(8, 8), (5, 5), (3, 9), (9, 3)])
def test_softmax_in_blocks_is_softmax_in_each(
    mask_heads: int, key_width: int, value_width: int
) -> None:
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


def broadcasting(shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Reduces a full mask to one that broadcasts to it."""
    return lambda full: full[tuple(slice(0, size) for size in shape)]


@pytest.mark.parametrize("shape", [(1, 1, 1, 6, 11), (3, 1, 1, 6, 11), (1, 2, 4, 1, 11)])
def test_a_mask_may_broadcast(shape: tuple[int, ...]) -> None:
    q, k, v = draw(3, 2, 4, 6, 8), draw(3, 2, 4, 11, 8, seed=1), draw(3, 2, 4, 11, 8, seed=2)
    visible = broadcasting(shape)(draw(3, 2, 4, 6, 11, seed=3) > 0)
    assert visible.shape == shape
    found = softmax_in_blocks(q, k, v, visible)
    torch.testing.assert_close(found, dense(q, k, v, visible), rtol=1e-12, atol=1e-12)


def test_a_kernel_whose_first_keys_are_masked_is_correct() -> None:
    """Fused kernels take 512 keys at a time: the first of them are hidden here."""
    q, k, v = draw(1, 2, 1, 6, 8), draw(1, 2, 1, 1100, 8, seed=1), draw(1, 2, 1, 1100, 8, seed=2)
    visible = torch.arange(1100).expand(1, 1, 1, 6, 1100) >= 1050
    found = softmax_in_blocks(q.float(), k.float(), v.float(), visible)
    expected = F.scaled_dot_product_attention(q, k[:, :, :, 1050:], v[:, :, :, 1050:])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
