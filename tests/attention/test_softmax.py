"""Exact softmax attention compared with torch's implementation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from protlm.attention import create


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
    # Vectors with the coordinate of the mask.
    assert largest_tensor.numel <= heads * length * 16 < length * length
