"""Products by either library: which one is chosen, and that both are correct."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from protlm.attention.ops import products
from tests.rounding import error_bound


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


def test_large_or_shared_operands_are_one_call_each(monkeypatch):
    force_vendor(monkeypatch, is_amd=True)
    calls: list[int] = []
    linear = products._linear

    def count(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        calls.append(len(x))
        return linear(x, w, bias)

    monkeypatch.setattr(products, "_linear", count)
    x, w, _ = operands(2, 3)
    products.product(x, w)
    assert calls == []
    products.product(x, w[0, 0])
    assert calls == [2]
    monkeypatch.setattr(products, "_SMALL", 33 * 9 * 16)
    products.product(x, w)
    assert calls == [2, *[33] * 6]
    # Many positions, whichever side of the product they are on.
    monkeypatch.setattr(products, "_SMALL", 1 << 30)
    for rows, width in ((600, 4), (4, 600)):
        calls.clear()
        products.product(torch.ones(2, 3, rows, width), torch.ones(2, 3, 5, width))
        assert calls == [rows] * 6


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
