"""Shared operations: products by either library, softmax in blocks, and random blocks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from protlm.attention.ops import products
from protlm.attention.ops.block_sparse import FixedBlocks, draw_blocks, hash_keys, random_subsets
from protlm.attention.ops.blocks import softmax_in_blocks
from tests.rounding import error_bound


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
    both = (torch.autograd.grad(x, leaves, cotangent) for x in (found, expected))
    torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12)


def test_a_kernel_whose_first_keys_are_masked_is_correct():
    """Fused kernels take 512 keys at a time: the first of them are hidden here."""
    q, k, v = draw(1, 2, 1, 6, 8), draw(1, 2, 1, 1100, 8, seed=1), draw(1, 2, 1, 1100, 8, seed=2)
    visible = torch.arange(1100).expand(1, 1, 1, 6, 1100) >= 1050
    found = softmax_in_blocks(q.float(), k.float(), v.float(), visible)
    expected = F.scaled_dot_product_attention(q, k[:, :, :, 1050:], v[:, :, :, 1050:])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


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
    for first, second in (
        (one, other),
        (one[:, 0], one[:, 1]),
        (one[0], one[1]),
        (one[:, :, 1:], one[:, :, :-1]),
    ):
        assert (first == second).double().mean() < 0.02


def operands(*leading: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*leading, 33, 16, generator=generator)
    w = torch.randn(*leading, 9, 16, generator=generator)
    return x, w, torch.randn(*leading, 9, generator=generator)


def force_vendor(monkeypatch: pytest.MonkeyPatch, *, is_amd: bool) -> None:
    monkeypatch.setattr(products, "_is_amd", lambda: is_amd)


@pytest.mark.parametrize("small", [0, 1 << 30], ids=["large", "small"])
@pytest.mark.parametrize("is_amd", [True, False], ids=["AMD", "others"])
@pytest.mark.parametrize("leading", [(), (1, 1), (2, 3)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_every_processor_gets_the_product(small, is_amd, leading, has_bias, monkeypatch):
    force_vendor(monkeypatch, is_amd=is_amd)
    monkeypatch.setattr(products, "_SMALL", small)
    x, w, bias = operands(*leading)
    found = products.product(x, w, bias if has_bias else None)
    bias_N = bias.double() if has_bias else torch.zeros_like(bias, dtype=torch.float64)
    expected = torch.einsum("...mk,...nk->...mn", x.double(), w.double()) + bias_N[..., None, :]
    # A sum of 16 products and a bias: at most 17 roundings of its terms' absolute values.
    sizes = torch.einsum("...mk,...nk->...mn", x.double().abs(), w.double().abs())
    bound = error_bound(torch.float32, sizes + bias_N.abs()[..., None, :], 17)
    assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("is_amd", [True, False])
def test_the_vendor_chooses_the_library(is_amd, monkeypatch):
    force_vendor(monkeypatch, is_amd=is_amd)
    assert products.takes_onednn(torch.ones(1)) == (is_amd and products._has_onednn())
    assert not products.takes_onednn(torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel", ""])
def test_the_vendor_is_read_from_the_machine(vendor, tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    for way in ("file", "platform"):
        monkeypatch.setattr(products, "Path", lambda _: cpuinfo)
        monkeypatch.setattr(products.platform, "processor", lambda: vendor)
        if way == "file":
            cpuinfo.write_text(f"vendor_id\t: {vendor}\n")
        else:
            cpuinfo.unlink()
        assert products._is_amd.__wrapped__() == (vendor == "AuthenticAMD")


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_sample_among_others_is_as_it_is_alone(has_bias):
    # The library is chosen by the size of one product, not by their number.
    x, w, bias = operands(4, 2)
    together = products.product(x, w, bias if has_bias else None)
    for sample in range(4):
        one = slice(sample, sample + 1)
        alone = products.product(x[one], w[one], bias[one] if has_bias else None)
        assert torch.equal(alone, together[one])


def test_onednn_receives_contiguous_rows(monkeypatch):
    """Without AVX-512 its kernel for other rows is thousands of times slower."""
    force_vendor(monkeypatch, is_amd=True)

    class Operands(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.mkldnn._linear_pointwise.default:
                dense.extend(x.is_contiguous() or x.mT.is_contiguous() for x in args[:2])
            return func(*args, **(kwargs or {}))

    dense: list[bool] = []
    # A head of a tensor BLHK.
    head = torch.randn(700, 3, 16)[:, 1]
    with Operands():
        products.product(head, head)
        products.product(head.mT, head.mT)
    # A torch without oneDNN computes the same product by its own library.
    assert bool(dense) == products._has_onednn()
    assert all(dense)
    # Sums of 700 products.
    exact, sizes = (x.mT.double() @ x.double() for x in (head, head.abs()))
    found = products.product(head.mT, head.mT)
    assert ((found - exact).abs() <= error_bound(torch.float32, sizes, 700)).all()
