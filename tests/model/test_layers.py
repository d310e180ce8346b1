"""Layers of the network: products by either library, feed-forward, output, convolution, dropout."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.ops import products
from protlm.config import Activation, HeadKind, ModelConfig
from protlm.data.vocabulary import VOCABULARY
from protlm.model.block import FeedForward
from protlm.model.layers import Linear, ShortConvolution, drop_masked_tokens
from protlm.model.memory import TensorMemory
from protlm.model.transformer import build_network
from tests.attention.cases import LargestTensor
from tests.rounding import error_bound
from tests.small_models import network_of, random_tokens

SIZES = ModelConfig(num_layers=2, num_heads=2, model_dim=16, feedforward_dim=32)
D, WIDTH = 16, 96
A, MASK, PAD = VOCABULARY["A"], VOCABULARY.mask, VOCABULARY.pad


def drawn(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, length, D, generator=generator, dtype=torch.float64).to(dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what oneDNN multiplies, as on an AMD processor."""
    found: list[tuple[int, ...]] = []
    library = products._linear if products._has_onednn() else F.linear

    def count(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        found.append(tuple(x.shape))
        return library(x, w, bias)

    monkeypatch.setattr(products, "_is_amd", lambda: True)
    monkeypatch.setattr(products, "_has_onednn", lambda: True)
    monkeypatch.setattr(products, "_linear", count)
    return found


@pytest.mark.parametrize("has_bias", [True, False])
def test_both_libraries_give_the_product(has_bias, calls):
    torch.manual_seed(0)
    layer, x = Linear(16, 9, bias=has_bias), drawn(7)
    by_torch = layer(x)
    assert by_torch.requires_grad and calls == []
    with torch.no_grad():
        by_onednn = layer(x)
    assert calls == [(3, 7, 16)]
    bias = layer.bias.double() if has_bias else torch.zeros(9)
    exact = x.double() @ layer.weight.double().mT + bias
    sizes = x.double().abs() @ layer.weight.double().abs().mT + bias.abs()
    for found in (by_torch, by_onednn):
        # A sum of 16 products and a bias.
        assert ((found - exact).abs() <= error_bound(torch.float32, sizes, 17)).all()


def test_other_products_stay_with_torch(calls):
    layer = Linear(16, 9)
    with torch.no_grad():
        layer(drawn(1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(drawn(7)).dtype == torch.bfloat16
        layer.double()(drawn(7).double())
    assert calls == []


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
def test_without_numbers_or_in_a_trace_torch_multiplies(calls):
    layer = Linear(16, 9)
    traced = torch.jit.trace(layer, drawn(7), check_trace=False)
    assert torch.equal(traced(drawn(7)), F.linear(drawn(7), layer.weight, layer.bias))
    with torch.no_grad():
        traced = torch.jit.trace(layer, drawn(7), check_trace=False)
        assert torch.equal(traced(drawn(7)), F.linear(drawn(7), layer.weight, layer.bias))
        assert layer.to("meta")(drawn(7).to("meta")).shape == (3, 7, 9)
    assert calls == []


@pytest.mark.parametrize("head", HeadKind)
@pytest.mark.parametrize("activation", Activation)
def test_all_layers_of_a_network_take_it(head, activation, calls):
    config = replace(SIZES, head=head, activation=activation, output_gate=True)
    network = build_network(config, {"name": "softmax"}, seed=0).eval()
    tokens_BL = torch.full((3, 7), VOCABULARY.mask)
    with torch.no_grad():
        network(tokens_BL, torch.ones_like(tokens_BL, dtype=torch.bool), causal=False)
    # Queries, keys and values are one product; then the gate, the output, and the sublayer's two
    # or three matrices.
    in_block = 3 + (3 if activation is Activation.swiglu else 2)
    assert len(calls) == 2 * in_block + (2 if head is HeadKind.dense_norm else 1)


def made(activation: Activation, chunk: int | None, dtype: torch.dtype) -> FeedForward:
    torch.manual_seed(0)
    sizes = {"model_dim": D, "feedforward_dim": WIDTH}
    return FeedForward(**sizes, activation=activation, chunk=chunk).to(dtype)


def by_the_formula(layer: FeedForward, x_BLD: Tensor) -> Tensor:
    up_BLF = x_BLD @ layer.up.weight.mT
    if layer.activation is Activation.swiglu:
        assert layer.gate is not None
        gate_BLF = x_BLD @ layer.gate.weight.mT
        return (gate_BLF * gate_BLF.sigmoid() * up_BLF) @ layer.down.weight.mT
    up_BLF = up_BLF + layer.up.bias
    if layer.activation is Activation.relu:
        active_BLF = up_BLF.clamp(min=0)
    else:
        active_BLF = up_BLF * (1 + torch.erf(up_BLF / 2**0.5)) / 2
    return active_BLF @ layer.down.weight.mT + layer.down.bias


def gradients(out_BLD: Tensor, x_BLD: Tensor, layer: FeedForward) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    weights_BLD = torch.rand(out_BLD.shape, generator=generator, dtype=torch.float64)
    total = (out_BLD * weights_BLD.to(out_BLD.dtype)).sum()
    return torch.autograd.grad(total, (x_BLD, *layer.parameters()))


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("chunk", [None, 1, 7, 8, 64])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 50])
def test_chunks_change_neither_output_nor_gradients(activation, chunk, length):
    layer = made(activation, chunk, torch.float64)
    x_BLD = drawn(length, torch.float64).requires_grad_()
    out_BLD, expected_BLD = layer(x_BLD), by_the_formula(layer, x_BLD)
    torch.testing.assert_close(out_BLD, expected_BLD, rtol=1e-12, atol=1e-12)
    both = (gradients(x, x_BLD, layer) for x in (out_BLD, expected_BLD))
    for found, expected in zip(*both, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        assert torch.equal(layer(x_BLD), out_BLD)


@pytest.mark.parametrize("activation", Activation)
def test_chunks_are_as_precise_in_bfloat16(activation):
    length, errors = 3000, {}
    exact, x_BLD = made(activation, None, torch.float64), drawn(length, torch.float64)
    out_BLD = exact(x_BLD.requires_grad_())
    expected = [out_BLD, *gradients(out_BLD, x_BLD, exact)]
    for chunk in (None, 10):
        layer, x_BLD = made(activation, chunk, torch.float32), drawn(length, torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out_BLD = layer(x_BLD.requires_grad_())
        assert out_BLD.dtype is torch.bfloat16
        found = [out_BLD, *gradients(out_BLD, x_BLD, layer)]
        errors[chunk] = [
            float((x.double() - y).detach().norm() / y.detach().norm())
            for x, y in zip(found, expected, strict=True)
        ]
    for chunked, whole in zip(errors[10], errors[None], strict=True):
        assert chunked < 1.2 * whole


@pytest.mark.parametrize("activation", Activation)
def test_no_tensor_has_all_positions_and_the_feedforward_width(activation):
    chunk, length = 16, 640
    x_BLD = drawn(length, torch.float32).requires_grad_()
    whole, chunked = made(activation, None, x_BLD.dtype), made(activation, chunk, x_BLD.dtype)
    with LargestTensor() as tensors:
        whole(x_BLD)
    assert tensors.numel == 3 * length * WIDTH
    with LargestTensor() as tensors, TensorMemory() as memory:
        out_BLD = chunked(x_BLD)
        # The output is kept, but no copy of the input.
        assert memory._bytes == 4 * out_BLD.numel()
        out_BLD.square().sum().backward()
    assert tensors.numel == out_BLD.numel()
    # The output, its gradient, that of the chunks and of the input; a few chunks in full width.
    assert memory.peak < 4 * (5 * out_BLD.numel() + 12 * 3 * chunk * WIDTH)


def test_the_logits_are_those_of_the_formula():
    choices = {"head": "dense_norm", "tied_head": True, "norm": "layer"}
    model = network_of("attention=softmax", **choices).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        out = model(*random_tokens(37), causal=False, layers=[2])
        weights = model.state_dict()
        x = out.hidden[2] @ weights["head_transform.dense.weight"].T
        x = x + weights["head_transform.dense.bias"]
        x = x / 2 * (1 + torch.erf(x / math.sqrt(2)))
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        x = x * weights["head_transform.norm.weight"] + weights["head_transform.norm.bias"]
        expected = x @ weights["embedding.weight"].T + weights["head.bias"]
    torch.testing.assert_close(out.logits_BLV, expected, rtol=1e-10, atol=1e-10)


def test_a_tied_head_trains_the_embedding():
    model = network_of("attention=softmax", tied_head=True)
    assert "head.weight" not in model.state_dict()
    # The logits of a new model have a variance of about 1.
    logits_BLV = model(*random_tokens(37), causal=False).logits_BLV
    assert 0.5 < logits_BLV.std() < 2
    # U is not among the inputs.
    logits_BLV[..., VOCABULARY["U"]].sum().backward()
    gradient = model.embedding.weight.grad
    assert gradient is not None
    assert gradient[VOCABULARY["U"]].abs().max() > 0


@pytest.mark.parametrize("norm, default", [("layer", 1e-5), ("rms", 1e-6)])
def test_the_epsilon_of_all_norms_can_be_set(norm, default):
    for epsilon in (None, 1e-12):
        model = network_of(norm=norm, norm_epsilon=epsilon or "null", embedding_norm=True)
        found = {module.eps for module in model.modules() if hasattr(module, "eps")}
        assert found == {epsilon or default}


def scales(rows: list[list[int]]) -> torch.Tensor:
    """What the embeddings of ones become."""
    tokens_BL = torch.tensor(rows)
    x_BLD = torch.ones(*tokens_BL.shape, 3, dtype=torch.float64)
    return drop_masked_tokens(x_BLD, tokens_BL, tokens_BL != PAD)[..., 0]


@pytest.mark.parametrize("num_masks", [0, 1, 3])
def test_the_scale_is_088_over_the_unmasked_fraction(num_masks):
    row = [0, *[MASK] * num_masks, *[A] * (8 - num_masks), 2]
    expected = torch.full((10,), 0.88 / (1 - num_masks / 10), dtype=torch.float64)
    expected[1 : 1 + num_masks] = 0
    torch.testing.assert_close(scales([row])[0], expected, rtol=1e-14, atol=0)


def test_padding_and_other_rows_do_not_count_and_a_row_of_masks_is_finite():
    row = [0, MASK, A, 2]
    alone = scales([row])[0]
    batch = scales([[*row, PAD, PAD], [0, A, A, A, A, 2]])
    assert torch.equal(batch[0, :4], alone)
    assert torch.equal(scales([[MASK, MASK]]), torch.zeros(1, 2, dtype=torch.float64))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [3, 5, 7])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_the_convolution_follows_its_formula(width, length, causal):
    layer = ShortConvolution(model_dim=6, width=width).double()
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    x_BLD = torch.randn(2, length, 6, dtype=torch.float64)
    mask_BL = torch.ones(2, length, dtype=torch.bool)
    mask_BL[1, -1] = False
    found = layer(x_BLD, mask_BL, causal=causal)
    first = 1 - width if causal else -(width // 2)
    for b in range(2):
        for t in range(length):
            expected = x_BLD[b, t].clone()
            for j in range(width):
                if 0 <= t + first + j < length and mask_BL[b, t + first + j]:
                    expected += layer.weight[:, j] * x_BLD[b, t + first + j]
            torch.testing.assert_close(found[b, t], expected * mask_BL[b, t])


def test_the_gradients_of_the_convolution_follow_its_formula():
    layer = ShortConvolution(model_dim=5, width=5).double()
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    x_BLD = torch.randn(2, 8, 5, dtype=torch.float64, requires_grad=True)
    mask_BL = torch.tensor([[True] * 8, [True] * 6 + [False] * 2])
    for causal in (False, True):

        def run(x: Tensor, weight: Tensor, causal: bool = causal) -> Tensor:
            inputs = {"weight": weight}
            return torch.func.functional_call(layer, inputs, (x, mask_BL), {"causal": causal})

        assert torch.autograd.gradcheck(run, (x_BLD, layer.weight))
