"""The attention sublayer: one product for three, norms, and rotary positions by their formula.

The formula is equation 34 of arXiv 2104.09864, written pair by pair.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protlm.attention import create
from protlm.config import ModelConfig, QueryKeyWidth
from protlm.model import selfattention
from protlm.model.layers import Linear
from protlm.model.positions import Rotary, rotate
from protlm.model.selfattention import BoundedNorm, Context, SelfAttention, Tokens, WidthNorm
from protlm.system.errors import UserError
from protlm.training.lora import add_adapters

SIZES = {"num_layers": 1, "num_heads": 2, "model_dim": 8, "feedforward_dim": 8}
ONES_BL = torch.ones(3, 5, dtype=torch.int64)
CONTEXT = Context(ONES_BL, ONES_BL.bool(), None, causal=False)


def sublayer_of(name: str, **changes: Any) -> SelfAttention:
    mechanism = create(name, {}, num_heads=2, head_dim=4, model_dim=8, max_length=16)
    torch.manual_seed(0)
    return SelfAttention(ModelConfig(**SIZES, **changes), mechanism, Tokens(33, 1))


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
    for one, other in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other)


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


def run(layer: SelfAttention) -> Tensor:
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
    run(sublayer).sum().backward()
    assert len(CALLS) == 1
    assert [name for name, p in sublayer.named_parameters() if p.grad is None] == []
    if handle is not None:
        handle.remove()


def test_plain_layers_are_one_product(sublayer, monkeypatch):
    expected, linear = run(sublayer), selfattention.linear
    monkeypatch.setattr(selfattention, "linear", lambda *x: CALLS.append(x) or linear(*x))
    handle = sublayer.query.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(run(sublayer), expected)
    assert CALLS == []
    handle.remove()
    assert torch.equal(run(sublayer), expected)
    # A parametrization changes the weight alone.
    add_adapters(nn.ModuleDict({"blocks": sublayer}), rank=1, targets=["query"], seed=0)
    assert torch.equal(run(sublayer), expected)
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
    expected_BHLK = normed_BLD.unflatten(-1, (2, 4)).transpose(1, 2)
    torch.testing.assert_close(inputs.q_BHLK, expected_BHLK)
    with pytest.raises(UserError, match=r"qk_norm_width=layer needs model\.qk_norm=true"):
        ModelConfig(**SIZES, qk_norm_width=QueryKeyWidth.layer)


@pytest.mark.parametrize("linear", ["performer_relu", "performer_softmax", "linear", "rfa"])
def test_exact_heads_of_a_hybrid_can_look_at_one_key_and_the_others_keep_their_norms(linear):
    options = {"local_heads": 1, "window": 512, "mechanism": linear}
    mechanism = create("hybrid", options, num_heads=4, head_dim=16, model_dim=64, max_length=300)
    config = ModelConfig(num_layers=1, num_heads=4, model_dim=64, feedforward_dim=8, qk_norm=True)
    layer = SelfAttention(config, mechanism, Tokens(33, 1)).double()
    plain = create(linear, {}, num_heads=4, head_dim=16, model_dim=64, max_length=300)
    alone = SelfAttention(config, plain, Tokens(33, 1)).double()
    torch.manual_seed(0)
    hidden_BLD = torch.randn(1, 257, 64, dtype=torch.float64)
    ones_BL = torch.ones(1, 257, dtype=torch.int64)
    context = Context(ones_BL, ones_BL.bool(), None, causal=False)
    with torch.no_grad():
        layer.key.weight.copy_(layer.query.weight)
        for name in ("query", "key", "value"):
            getattr(alone, name).weight.copy_(getattr(layer, name).weight)
        for norm in (layer.query_norm, layer.key_norm):
            norm.exact.gain.fill_(3.0)
        found, expected = layer.inputs(hidden_BLD, context), alone.inputs(hidden_BLD, context)
    # Queries are keys: with a bound of 3, a position would give itself 7 % at most.
    map_BHLL = mechanism.attention_map(
        found.q_BHLK, found.k_BHLK, hidden_BLD=hidden_BLD, mask_BL=ones_BL.bool(), causal=False
    )
    assert map_BHLL[0, 0].diagonal().min() > 0.9
    torch.testing.assert_close(found.q_BHLK[:, 1:], expected.q_BHLK[:, 1:])
    is_bounded = isinstance(alone.query_norm, BoundedNorm)
    assert is_bounded == isinstance(layer.query_norm.linear, BoundedNorm) == (linear != "rfa")


def by_pairs(x_BHLK: Tensor, start: int) -> Tensor:
    """Each pair (i, i + K/2) as a complex number, times exp(i·position·frequency)."""
    half = x_BHLK.shape[-1] // 2
    frequency = torch.tensor([10_000.0 ** (-i / half) for i in range(half)], dtype=torch.float64)
    position = torch.arange(start, start + x_BHLK.shape[2], dtype=torch.float64)
    angles = position[:, None] * frequency
    turn = torch.polar(torch.ones_like(angles), angles)
    turned = torch.complex(x_BHLK[..., :half], x_BHLK[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("start", [0, 35_000])
def test_rotation_and_its_gradient_are_those_of_the_formula(start):
    generator = torch.Generator().manual_seed(0)
    # The layout of the model: heads come out of one product, so that positions are not adjacent.
    x_BLHK = torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=generator)
    weights = torch.randn(2, 3, 5, 8, dtype=torch.float64, generator=generator)
    angles = Rotary(head_dim=8).angles(start, start + 5)
    results = []
    for turn in (lambda x: rotate(x, *angles), lambda x: by_pairs(x, start)):
        leaf = x_BLHK.clone().requires_grad_()
        out = turn(leaf.transpose(1, 2))
        (gradient,) = torch.autograd.grad((out * weights).sum(), leaf)
        results.append((out, gradient))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_rotation_in_pieces_is_equal_and_may_be_empty(monkeypatch):
    x_BHLK = torch.randn(2, 3, 11, 8, generator=torch.Generator().manual_seed(0))
    angles = Rotary(head_dim=8).angles(7, 18)
    expected_BHLK = rotate(x_BHLK, *angles)
    # 4 positions of 48 numbers at a time, and 3 at the end; or less than one.
    for numbers in (200, 1):
        monkeypatch.setattr("protlm.model.positions._PIECE", numbers)
        assert torch.equal(rotate(x_BHLK, *angles), expected_BHLK)
        assert rotate(x_BHLK[:0], *angles).shape == (0, 3, 11, 8)


def test_low_precision_is_kept_and_rounded_once():
    x_BHLK = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    angles = Rotary(head_dim=8).angles(100, 109)
    low_BHLK = x_BHLK.bfloat16()
    turned = rotate(low_BHLK, *angles)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(low_BHLK.float(), *angles).bfloat16())
    norms = turned.float().norm(dim=-1) / low_BHLK.float().norm(dim=-1)
    assert math.isclose(norms.mean().item(), 1.0, rel_tol=1e-2)


def test_stored_frequencies_are_those_of_the_file():
    """Angles are those of frequencies that were rounded in training."""
    assert Rotary(head_dim=8).state_dict() == {}
    rotary = Rotary(head_dim=8, stored=True)
    rounded = rotary.frequency.half().float()
    assert not torch.equal(rounded.double(), rotary.frequency)
    rotary.load_state_dict({"frequency": rounded})
    cos_LK, sin_LK = rotary.angles(5, 7)
    angle = torch.tensor([5.0, 6.0], dtype=torch.float64)[:, None] * rounded.double()
    assert torch.equal(cos_LK, angle.cos().repeat(1, 2).float())
    assert torch.equal(sin_LK, angle.sin().repeat(1, 2).float())
