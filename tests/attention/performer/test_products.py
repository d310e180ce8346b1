"""Products by either library, which of them takes what, and that both are the product."""

import pytest
import torch
from torch import Tensor

from protlm.attention.performer import products


def operands(*leading: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*leading, 33, 16, generator=generator)
    w = torch.randn(*leading, 9, 16, generator=generator)
    return x, w, torch.randn(*leading, 9, generator=generator)


@pytest.mark.parametrize("small", [0, 1 << 30], ids=["oneDNN", "MKL"])
@pytest.mark.parametrize("leading", [(), (1, 1), (2, 3)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_both_libraries_make_the_product(
    small: int, leading: tuple[int, ...], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_SMALL", small)
    x, w, bias = operands(*leading)
    found = products.product(x, w, bias if has_bias else None)
    expected = torch.einsum("...mk,...nk->...mn", x.double(), w.double())
    expected = expected + bias.double()[..., None, :] if has_bias else expected
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_sample_among_others_is_as_it_is_alone(has_bias: bool) -> None:
    # The library is chosen by the size of one product, not by their number.
    x, w, bias = operands(4, 2)
    together = products.product(x, w, bias if has_bias else None)
    for sample in range(4):
        one = slice(sample, sample + 1)
        alone = products.product(x[one], w[one], bias[one] if has_bias else None)
        assert torch.equal(alone, together[one])


def test_what_is_large_or_shared_is_left_to_one_call_each(monkeypatch: pytest.MonkeyPatch) -> None:
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
