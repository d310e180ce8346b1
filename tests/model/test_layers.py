"""Layers of the network: products by either library, feed-forward, output, convolution, dropout.

And the attention sublayer: one product for three, norms, and rotary positions by equation 34 of
arXiv 2104.09864, written pair by pair.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.attention import create
from protlm.attention.ops import products
from protlm.config import Activation, ModelConfig, QueryKeyWidth
from protlm.data.vocabulary import VOCABULARY
from protlm.model import selfattention
from protlm.model.block import FeedForward
from protlm.model.layers import Linear, ShortConvolution, drop_masked_tokens
from protlm.model.memory import TensorMemory
from protlm.model.positions import Rotary, rotate
from protlm.model.selfattention import BlockContext, BoundedNorm, SelfAttention, WidthNorm
from protlm.system.errors import UserError
from protlm.training.lora import add_adapters
from tests.attention.cases import LargestTensor
from tests.small_models import network_of, random_tokens

SIZES = ModelConfig(num_layers=2, num_heads=2, model_dim=16, feedforward_dim=32)
D, WIDTH = 16, 96
A, MASK, PAD = VOCABULARY["A"], VOCABULARY.mask, VOCABULARY.pad


def drawn(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, length, D, generator=generator, dtype=torch.float64).to(dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, look_at) -> list[tuple[int, ...]]:
    """Shapes of what oneDNN multiplies, as on an AMD processor."""
    found: list[tuple[int, ...]] = []
    library = products._linear if products._has_onednn() else F.linear
    monkeypatch.setattr(products, "_is_amd", lambda: True)
    monkeypatch.setattr(products, "_has_onednn", lambda: True)
    monkeypatch.setattr(products, "_linear", library)
    look_at(products, "_linear", lambda x, *_: found.append(tuple(x.shape)))
    return found


def test_products_without_gradients_are_by_onednn_and_others_stay_with_torch(calls):
    layer = Linear(16, 9)
    by_torch = layer(drawn(7))
    assert by_torch.requires_grad and calls == []
    with torch.no_grad():
        torch.testing.assert_close(layer(drawn(7)), by_torch)
        assert calls == [(3, 7, 16)]
        layer(drawn(1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(drawn(7)).dtype == torch.bfloat16
        layer.double()(drawn(7).double())
    assert len(calls) == 1


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
def test_without_numbers_or_in_a_trace_torch_multiplies(calls):
    for has_gradients in (True, False):
        layer = Linear(16, 9)
        with torch.set_grad_enabled(has_gradients):
            traced = torch.jit.trace(layer, drawn(7), check_trace=False)
            assert torch.equal(traced(drawn(7)), F.linear(drawn(7), layer.weight, layer.bias))
            assert layer.to("meta")(drawn(7).to("meta")).shape == (3, 7, 9)
    assert calls == []


def made(activation: Activation, chunk: int | None, dtype: torch.dtype) -> FeedForward:
    torch.manual_seed(0)
    config = replace(SIZES, model_dim=D, feedforward_dim=WIDTH, activation=activation)
    return FeedForward(replace(config, feedforward_chunk=chunk)).to(dtype)


def by_the_formula(layer: FeedForward, x_BLD: Tensor) -> Tensor:
    up_BLF = x_BLD @ layer.up.weight.mT
    if layer.gate is not None:
        gate_BLF = x_BLD @ layer.gate.weight.mT
        fraction_BLF = gate_BLF.sigmoid()
        if layer.activation is Activation.geglu:
            inner_BLF = (2 / math.pi) ** 0.5 * (gate_BLF + 0.044715 * gate_BLF**3)
            fraction_BLF = (1 + inner_BLF.tanh()) / 2
        return (gate_BLF * fraction_BLF * up_BLF) @ layer.down.weight.mT
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
    torch.testing.assert_close(*both, rtol=1e-11, atol=1e-11)
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


def test_a_tied_head_trains_the_embedding():
    model = network_of("attention=softmax", tied_head=True)
    assert "head.weight" not in model.state_dict()
    # The logits of a new model have a variance of about 1.
    logits_BLV = model(*random_tokens(37), causal=False).logits_BLV
    assert 0.5 < logits_BLV.std() < 2
    # U is not among the inputs.
    logits_BLV[..., VOCABULARY["U"]].sum().backward()
    assert model.embedding.weight.grad[VOCABULARY["U"]].abs().max() > 0


@pytest.mark.parametrize("norm, default", [("layer", 1e-5), ("rms", 1e-6)])
def test_the_epsilon_of_all_norms_can_be_set(norm, default):
    for epsilon in (None, 1e-12):
        model = network_of(norm=norm, norm_epsilon=epsilon, embedding_norm=True)
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
    assert torch.equal(scales([[*row, PAD, PAD], [0, A, A, A, A, 2]])[0, :4], alone)
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


SUBLAYER = {"num_layers": 1, "num_heads": 2, "model_dim": 8, "feedforward_dim": 8}
ONES_BL = torch.ones(3, 5, dtype=torch.int64)
CONTEXT = BlockContext(ONES_BL, ONES_BL.bool(), None, causal=False)


def sublayer_of(name: str, **changes: Any) -> SelfAttention:
    mechanism = create(name, {}, num_heads=2, head_dim=4, model_dim=8, max_length=16)
    torch.manual_seed(0)
    return SelfAttention(ModelConfig(**SUBLAYER, **changes), mechanism, VOCABULARY)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["softmax", "reformer"])
def test_queries_keys_and_values_are_those_of_their_projections(name, bias):
    layer = sublayer_of(name, attention_bias=bias).double()
    names = {name for name, _ in layer.named_parameters()}
    assert ("output.bias" in names) == ("query.bias" in names) == bias
    hidden_BLD = torch.randn(3, 5, 8, dtype=torch.float64)
    inputs = layer.inputs(hidden_BLD, CONTEXT)
    # A mechanism whose keys are its queries has no projection for keys.
    assert (layer.key is None) == (name == "reformer")
    key = layer.query if layer.key is None else layer.key
    found = (inputs.q_BHLK, inputs.k_BHLK, inputs.v_BHLC)
    expected = [
        projection(hidden_BLD).unflatten(-1, (2, 4)).transpose(1, 2)
        for projection in (layer.query, key, layer.value)
    ]
    # The mechanism is not involved.
    parts = ("query", "key", "value")
    weights = [p for name, p in layer.named_parameters() if name.partition(".")[0] in parts]
    gradients = []
    for three in (found, expected):
        total = sum((factor * x.sin()).sum() for factor, x in enumerate(three, start=1))
        gradients.append(torch.autograd.grad(total, weights))
    torch.testing.assert_close((*found, *gradients[0]), (*expected, *gradients[1]))


CALLS: list[object] = []


class Adapted(Linear):
    """A layer with an addition of low rank, as adapters and quantized layers are."""

    def forward(self, input: Tensor) -> Tensor:
        CALLS.append(self)
        return super().forward(input) + self.up(self.down(input))


def change(layer: SelfAttention, way: str) -> Any:
    """Makes a projection one that is not plain; returns the handle of a hook."""
    if way == "adapter":
        layer.value.down, layer.value.up = nn.Linear(8, 2), nn.Linear(2, 8)
        layer.value.__class__ = Adapted
    elif way == "forward":
        before = layer.query.forward
        layer.query.forward = lambda input: CALLS.append(input) or before(input)
    elif way == "register_module_forward_hook":
        return nn.modules.module.register_module_forward_hook(
            lambda module, *_: CALLS.append(module) if module is layer.key else None
        )
    else:
        return getattr(layer.query, way)(lambda *given: CALLS.append(given))
    return None


def run_sublayer(layer: SelfAttention) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    hidden_BLD = torch.randn(3, 5, 8, generator=generator).requires_grad_()
    return layer(hidden_BLD, CONTEXT)


@pytest.fixture
def sublayer() -> SelfAttention:
    CALLS.clear()
    return sublayer_of("linear")


HOOKS = ("forward", "forward_pre", "full_backward", "full_backward_pre", "module_forward")


@pytest.mark.parametrize("way", ["adapter", "forward", *(f"register_{x}_hook" for x in HOOKS)])
def test_what_is_not_a_plain_layer_is_called(way, sublayer):
    handle = change(sublayer, way)
    run_sublayer(sublayer).sum().backward()
    assert len(CALLS) == 1
    assert [name for name, p in sublayer.named_parameters() if p.grad is None] == []
    if handle is not None:
        handle.remove()


def test_plain_layers_are_one_product(sublayer, monkeypatch):
    expected, linear = run_sublayer(sublayer), selfattention.linear
    monkeypatch.setattr(selfattention, "linear", lambda *x: CALLS.append(x) or linear(*x))
    handle = sublayer.query.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(run_sublayer(sublayer), expected)
    assert CALLS == []
    handle.remove()
    assert torch.equal(run_sublayer(sublayer), expected)
    # A parametrization changes the weight alone.
    add_adapters(nn.ModuleDict({"blocks": sublayer}), rank=1, targets=["query"], seed=0)
    assert torch.equal(run_sublayer(sublayer), expected)
    assert len(CALLS) == 2


def test_a_query_key_norm_may_have_the_width_of_all_heads():
    layer = sublayer_of("linear", qk_norm=True, qk_norm_width=QueryKeyWidth.layer).double()
    assert isinstance(layer.query_norm, WidthNorm)
    assert isinstance(layer.key_norm, WidthNorm)
    torch.manual_seed(0)
    torch.nn.init.normal_(layer.query_norm.weight)
    hidden_BLD = torch.randn(3, 5, 8, dtype=torch.float64)
    inputs = layer.inputs(hidden_BLD, CONTEXT)
    query_BLD = layer.query(hidden_BLD)
    centered_BLD = query_BLD - query_BLD.mean(-1, keepdim=True)
    variance_BL1 = centered_BLD.square().mean(-1, keepdim=True)
    normed_BLD = centered_BLD / (variance_BL1 + 1e-5).sqrt() * layer.query_norm.weight
    torch.testing.assert_close(inputs.q_BHLK, normed_BLD.unflatten(-1, (2, 4)).transpose(1, 2))
    with pytest.raises(UserError, match=r"qk_norm_width=layer needs model\.qk_norm=true"):
        ModelConfig(**SUBLAYER, qk_norm_width=QueryKeyWidth.layer)


@pytest.mark.parametrize("linear", ["performer_relu", "performer_softmax", "linear", "rfa"])
def test_exact_heads_of_a_hybrid_can_look_at_one_key_and_the_others_keep_their_norms(linear):
    options = {"local_heads": 1, "window": 512, "mechanism": linear}
    mechanism = create("hybrid", options, num_heads=4, head_dim=16, model_dim=64, max_length=300)
    config = ModelConfig(num_layers=1, num_heads=4, model_dim=64, feedforward_dim=8, qk_norm=True)
    layer = SelfAttention(config, mechanism, VOCABULARY).double()
    plain = create(linear, {}, num_heads=4, head_dim=16, model_dim=64, max_length=300)
    alone = SelfAttention(config, plain, VOCABULARY).double()
    torch.manual_seed(0)
    hidden_BLD = torch.randn(1, 257, 64, dtype=torch.float64)
    ones_BL = torch.ones(1, 257, dtype=torch.int64)
    context = BlockContext(ones_BL, ones_BL.bool(), None, causal=False)
    with torch.no_grad():
        layer.key.weight.copy_(layer.query.weight)
        for name in ("query", "key", "value"):
            getattr(alone, name).weight.copy_(getattr(layer, name).weight)
        for norm in (layer.query_norm, layer.key_norm):
            norm.exact.gain.fill_(3.0)
        found, expected = layer.inputs(hidden_BLD, context), alone.inputs(hidden_BLD, context)
    # Queries are keys: with a bound of 3, a position would give itself 7 % at most.
    map_BHLL = mechanism.attention_map(found.q_BHLK, found.k_BHLK, found.context)
    assert map_BHLL[0, 0].diagonal().min() > 0.9
    torch.testing.assert_close(found.q_BHLK[:, 1:], expected.q_BHLK[:, 1:])
    is_bounded = isinstance(alone.query_norm, BoundedNorm)
    assert is_bounded == isinstance(layer.query_norm.linear, BoundedNorm) == (linear != "rfa")


def by_pairs(x_BHLK: Tensor, position_L: Tensor, base: float = 10_000.0) -> Tensor:
    """Each pair (i, i + K/2) as a complex number, times exp(i·position·frequency)."""
    half = x_BHLK.shape[-1] // 2
    angle_LK = position_L.double()[:, None] * base ** (-torch.arange(half).double() / half)
    turned = torch.complex(*x_BHLK.split(half, dim=-1)) * torch.exp(1j * angle_LK)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("start", [0, 35_000])
def test_rotation_and_its_gradient_are_those_of_the_formula(start):
    generator = torch.Generator().manual_seed(0)
    # The layout of the model: heads come out of one product, so that positions are not adjacent.
    x_BLHK = torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=generator)
    weights = torch.randn(2, 3, 5, 8, dtype=torch.float64, generator=generator)
    position_L, results = torch.arange(start, start + 5), []
    angles = Rotary(head_dim=8).angles(position_L)
    for turn in (lambda x: rotate(x, *angles), lambda x: by_pairs(x, position_L)):
        leaf = x_BLHK.clone().requires_grad_()
        out = turn(leaf.transpose(1, 2))
        (gradient,) = torch.autograd.grad((out * weights).sum(), leaf)
        results.append((out, gradient))
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


def test_a_rotation_in_pieces_is_equal_and_may_be_empty(monkeypatch):
    x_BHLK = torch.randn(2, 3, 11, 8, generator=torch.Generator().manual_seed(0))
    angles = Rotary(head_dim=8).angles(torch.arange(7, 18))
    expected_BHLK = rotate(x_BHLK, *angles)
    # 4 positions of 48 numbers at a time, and 3 at the end; or less than one.
    for numbers in (200, 1):
        monkeypatch.setattr("protlm.model.positions._CHUNK", numbers)
        assert torch.equal(rotate(x_BHLK, *angles), expected_BHLK)
        assert rotate(x_BHLK[:0], *angles).shape == (0, 3, 11, 8)


def test_low_precision_is_kept_and_rounded_once():
    x_BHLK = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    angles = Rotary(head_dim=8).angles(torch.arange(100, 109))
    low_BHLK = x_BHLK.bfloat16()
    turned = rotate(low_BHLK, *angles)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(low_BHLK.float(), *angles).bfloat16())
    low_angles = Rotary(head_dim=8).bfloat16().half().angles(torch.arange(100, 109))
    assert all(map(torch.equal, low_angles, angles))


def test_stored_frequencies_are_those_of_the_file():
    """Angles are those of frequencies that were rounded in training."""
    assert Rotary(head_dim=8).state_dict() == {}
    rotary = Rotary(head_dim=8, stored=True)
    rounded = rotary.frequency.half().float()
    assert not torch.equal(rounded.double(), rotary.frequency)
    rotary.load_state_dict({"frequency": rounded})
    cos_LK, sin_LK = rotary.angles(torch.arange(5, 7))
    angle = torch.tensor([5.0, 6.0], dtype=torch.float64)[:, None] * rounded.double()
    assert torch.equal(cos_LK, angle.cos().repeat(1, 2).float())
    assert torch.equal(sin_LK, angle.sin().repeat(1, 2).float())
