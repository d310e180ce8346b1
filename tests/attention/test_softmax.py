"""Exact softmax attention beside torch's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from protlm.attention import create, exact


@pytest.mark.parametrize("is_causal", [False, True])
def test_without_padding_it_is_scaled_dot_product_attention(
    is_causal: bool, make_inputs: Callable[..., Any]
) -> None:
    inputs = make_inputs(65).with_padding(1.0)
    inputs = inputs._replace(mask_BL=torch.ones_like(inputs.mask_BL))
    softmax = create("softmax", {}, num_heads=2, head_dim=8, model_dim=16, max_length=65)
    expected = F.scaled_dot_product_attention(*inputs[:3], is_causal=is_causal)
    torch.testing.assert_close(inputs.run(softmax, causal=is_causal), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_padded_key_has_no_weight_beside_large_logits(dtype: torch.dtype) -> None:
    softmax = create("softmax", {}, num_heads=1, head_dim=8, model_dim=8, max_length=2)
    q_BHLK = torch.full((1, 1, 2, 8), 100.0, dtype=dtype)
    v_BHLC = torch.tensor([1.0, 2.0], dtype=dtype)[:, None].expand(1, 1, 2, 8)
    mask_BL = torch.tensor([[False, True]])
    for causal in (False, True):
        out = softmax(
            q_BHLK, -q_BHLK, v_BHLC, hidden_BLD=q_BHLK[:, 0], mask_BL=mask_BL, causal=causal
        )
        assert out[0, 0, 1].eq(2).all()
        assert out[0, 0, 0].eq(0).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_memory_grows_with_the_length_only(is_causal: bool, largest_tensor: Any) -> None:
    length, heads, dim = 2048, 2, 8
    softmax = create("softmax", {}, num_heads=heads, head_dim=dim, model_dim=16, max_length=length)
    q, k, v = (torch.randn(1, heads, length, dim, requires_grad=True) for _ in range(3))
    mask_BL = torch.arange(length)[None] < length - 7
    with largest_tensor:
        out = softmax(q, k, v, hidden_BLD=q[:, 0], mask_BL=mask_BL, causal=is_causal)
        out.square().sum().backward()
    # A tile of weights, or vectors with the coordinate of the mask.
    tile = torch.get_num_threads() << 19
    assert largest_tensor.numel <= max(tile, heads * length * 16) < length * length


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [256, 700])
def test_tiles_of_queries_give_the_same_as_one_product(
    dtype: torch.dtype, length: int, make_inputs: Callable[..., Any], monkeypatch: Any
) -> None:
    # Several tiles, the last one not full.
    monkeypatch.setattr(exact, "_NUMBERS", 100 * length)
    assert exact.is_faster(length)
    softmax = create("softmax", {}, num_heads=2, head_dim=8, model_dim=16, max_length=length)
    inputs = make_inputs(length)
    leaves = [x.to(dtype).requires_grad_() for x in inputs[:3]]
    mask_BL = inputs.mask_BL
    out = softmax(*leaves, hidden_BLD=inputs.hidden_BLD, mask_BL=mask_BL, causal=False)
    gradients = torch.autograd.grad(out.sin().sum(), leaves)
    # torch's own lets NaN through.
    whole = inputs.with_padding(0.0)[:3]
    exact_leaves = [x.to(dtype).double().requires_grad_() for x in whole]
    visible_B1LL = mask_BL[:, None, :, None] & mask_BL[:, None, None]
    expected = F.scaled_dot_product_attention(*exact_leaves, attn_mask=visible_B1LL)
    expected = torch.where(mask_BL[:, None, :, None], expected, 0)
    expected_gradients = torch.autograd.grad(expected.sin().sum(), exact_leaves)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for found, wanted in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert found.dtype == dtype
        assert (found.double() - wanted).norm() <= tolerance * wanted.norm()
