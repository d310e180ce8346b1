"""Limits in which mechanisms are softmax or each other; maps; and sums that must not vanish."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import Attention, create
from protlm.attention.ops import block_sparse
from protlm.attention.performer_relu import PerformerRelu
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.model.transformer import build_network
from protlm.system.errors import UserError
from tests.attention.cases import MODES, Case, Inputs, find_case, make_inputs
from tests.rounding import error_bound

SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16, "max_length": 512}


def made(name: str, options: dict[str, Any], **sizes: int) -> Any:
    return create(name, options, **{**SIZES, **sizes}).double()


# Options with which every position sees every other of 130, once.
SEES_ALL: list[tuple[str, dict[str, Any]]] = [
    *(("longformer", {"window": 260, "num_global": number}) for number in (0, 1, 5)),
    ("window", {"window": 260}),
    *(("longformer", {"window": 2, "num_global": number}) for number in (130, 1000)),
    ("long_short", {"rank": 0, "window": 130, "dual_norm": False}),
    # More random blocks than there are: all that are left.
    ("bigbird", {"block_size": 8, "random_blocks": 1000}),
    ("bigbird", {"block_size": 8, "window_blocks": 1, "global_blocks": 0, "random_blocks": 1000}),
    # A window over everything.
    ("bigbird", {"block_size": 8, "window_blocks": 67, "random_blocks": 0, "global_blocks": 0}),
    # Global positions that are all there are.
    ("bigbird", {"block_size": 8, "num_global": 200, "random_blocks": 0, "global_blocks": 0}),
]


@MODES
@pytest.mark.parametrize(("name", "options"), SEES_ALL, ids=str)
def test_where_all_is_seen_it_is_softmax(name, options, causal):
    """Projections of global tokens start as copies of the others."""
    inputs = make_inputs(130)
    out = inputs.run(made(name, options), causal=causal)
    expected = inputs.run(made("softmax", {}), causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@MODES
def test_a_map_of_longformer_weighs_the_values_of_either_kind(causal):
    """Local rows mix v, global rows v'; padding has neither weight nor projection."""
    mechanism = find_case("longformer", window=6, num_global=3).create().double()
    inputs = make_inputs(60)
    clean, whole = inputs.with_padding(0.0), inputs.map_of(mechanism, causal=causal)
    of_global = clean.hidden_BLD @ mechanism.value_global
    own = clean.v_BHLC + of_global.unflatten(-1, (2, -1)).transpose(1, 2)
    # The first true positions, wherever padding is.
    is_global = inputs.mask_BL & (inputs.mask_BL.cumsum(1) <= 3)
    rows = torch.where(is_global[:, None, :, None], whole @ own, whole @ clean.v_BHLC)
    torch.testing.assert_close(inputs.run(mechanism, causal=causal), rows)


def test_a_map_of_long_short_has_the_weights_of_normalized_keys():
    mechanism = find_case("long_short", window=40, rank=3).create().double()
    inputs = make_inputs(40).without_padding()

    def normalized(x_BHLK: Tensor, norm: Any) -> Tensor:
        return norm(x_BHLK.transpose(1, 2).flatten(2)).unflatten(-1, (2, 8)).transpose(1, 2)

    scores = (inputs.hidden_BLD @ mechanism.projection).unflatten(-1, (2, 3))
    p_BHLP = scores.transpose(1, 2).softmax(dim=2)
    near_keys = normalized(inputs.k_BHLK, mechanism.near_norm)
    far_keys = normalized(p_BHLP.mT @ inputs.k_BHLK, mechanism.far_norm)
    logits = inputs.q_BHLK @ torch.cat([near_keys, far_keys], dim=2).mT / 8**0.5
    near, far = logits.softmax(dim=-1).split([40, 3], dim=-1)
    found = inputs.map_of(mechanism, causal=False)
    torch.testing.assert_close(found, (near + far @ p_BHLP.mT).detach())


def test_many_small_gradients_of_global_blocks_add_up_in_bfloat16(monkeypatch):
    """All 128 blocks see the global ones; in bfloat16 small gradients would be lost in the sum."""
    monkeypatch.setattr(block_sparse, "_CPU_ELEMENTS", 1)
    mechanism = create("bigbird", {"block_size": 4, "random_blocks": 2}, **SIZES, seed=1)
    inputs = make_inputs(512).without_padding().to(torch.bfloat16).differentiable()
    gradients = []
    for each in (inputs, inputs.to(torch.float64).differentiable()):
        out = each.run(mechanism, causal=True)
        (dv_BHLC,) = torch.autograd.grad(out, each.v_BHLC, torch.ones_like(out))
        gradients.append(dv_BHLC[:, :, :4].double())
    assert (gradients[0] - gradients[1]).norm() <= 1e-2 * gradients[1].norm()


NORMS = [f"{norm}_norm.{name}" for norm in ("near", "far") for name in ("weight", "bias")]
MIXTURES = ["key_projection", "value_projection"]
GLOBAL = ["query_global", "key_global", "value_global"]


@pytest.mark.parametrize(
    ("name", "options", "parameters"),
    [
        ("linformer", {"sharing": "none"}, dict.fromkeys(MIXTURES, (2, 256, 512))),
        ("linformer", {"sharing": "heads"}, dict.fromkeys(MIXTURES, (1, 256, 512))),
        ("linformer", {"sharing": "key_value"}, {MIXTURES[0]: (1, 256, 512)}),
        ("linformer", {"sharing": "layers"}, {MIXTURES[0]: (1, 256, 512)}),
        ("long_short", {"rank": 3}, {"projection": (16, 6), **dict.fromkeys(NORMS, (16,))}),
        ("long_short", {"rank": 0}, dict.fromkeys(NORMS[:2], (16,))),
        ("long_short", {"rank": 3, "dual_norm": False}, {"projection": (16, 6)}),
        ("longformer", {"num_global": 0}, {}),
        ("longformer", {"num_global": 2}, dict.fromkeys(GLOBAL, (16, 16))),
        ("longformer", {"num_global": 0, "global_positions": [3]}, dict.fromkeys(GLOBAL, (16, 16))),
    ],
)
def test_it_has_the_parameters_that_it_uses(name, options, parameters):
    made = create(name, options, **SIZES)
    assert {key: tuple(x.shape) for key, x in made.named_parameters()} == parameters


def test_layers_may_have_windows_and_dilations_of_different_sizes():
    given = ["attention.window=[4,8]", "attention.dilation=[1,3]", "attention.dilated_heads=1"]
    config = compose(TrainConfig, ["model=tiny", "attention=longformer", *given])
    network = build_network(config.model, config.attention, seed=0)
    layers: list[Any] = [network.mechanism(number) for number in (1, 2)]
    assert [(layer.window, layer.dilation) for layer in layers] == [(4, 1), (8, 3)]


def test_a_list_of_another_length_than_the_layers_is_refused():
    config = compose(TrainConfig, ["model=tiny", "attention=longformer", "attention.window=[4]"])
    message = r"attention\.window has 1 values, but the model has 2 layers \(model\.num_layers\)"
    with pytest.raises(UserError, match=message):
        build_network(config.model, config.attention, seed=0)


def test_modes_and_the_longest_input_of_a_hybrid_are_those_of_the_mechanism(monkeypatch):
    both = create("hybrid", {}, **SIZES)
    gated = create("hybrid", {"mechanism": "rfa", "options": {"gate": True}}, **SIZES)
    assert both.supports_bidirectional and both.supports_causal
    assert gated.supports_causal and not gated.supports_bidirectional
    assert both.max_length is None
    monkeypatch.setattr(PerformerRelu, "max_length", 99)
    assert create("hybrid", {}, **SIZES).max_length == 99


LENGTH = 300


def aft(name: str, **options: Any) -> tuple[Case, Attention]:
    """A mechanism whose biases are far from 0, in float64, and its case."""
    defaults = {"aft_full": {"rank": 6}, "aft_local": {"window": 40, "rank": 6}}
    case = find_case(name, **{**defaults.get(name, {}), **options})
    mechanism = case.create(max_length=LENGTH).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in mechanism.parameters():
        parameter.data = 1.5 * torch.randn(parameter.shape, generator=generator).double()
    return case, mechanism


NAMES = pytest.mark.parametrize("name", ["aft_full", "aft_local", "aft_simple", "aft_conv"])


@MODES
@NAMES
def test_the_map_is_the_mean_over_the_channels(name, causal):
    """A value of 1 at one position alone, behind open gates, is the weight of its position."""
    _, mechanism = aft(name)
    inputs = make_inputs(40).without_padding()
    inputs = inputs._replace(q_BHLK=torch.full_like(inputs.q_BHLK, 50.0))
    found = inputs.map_of(mechanism, causal=causal)
    for position in range(40):
        v_BHLC = torch.zeros_like(inputs.v_BHLC)
        v_BHLC[:, :, position] = 1
        out_BHLC = inputs._replace(v_BHLC=v_BHLC).run(mechanism, causal=causal)
        torch.testing.assert_close(found[..., position], out_BHLC.mean(-1).detach())


# Exponents that float32 represents exactly, so that errors come from the sums, not from rounding.
SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "each e^3 times the one before": lambda j: 3.0 * j,
    "each e^3 times less": lambda j: -3.0 * j,
    "the last e^200 times the others": lambda j: 200.0 * (j == j[-1]),
    "every third e^100 times the others": lambda j: 100.0 * (j % 3 == 1),
}


def compared(
    case: Case, mechanism: Attention, inputs: Inputs, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output in float32, and by the reference; outputs are no larger than values."""
    expected = case.expected(mechanism, inputs, causal=causal)
    leaves = inputs.to(torch.float32).differentiable()
    out = leaves.run(mechanism.float(), causal=causal)
    gradients = torch.autograd.grad(out.sum(), [*leaves[:3], *mechanism.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (out.abs().amax(2) <= leaves.v_BHLC.abs().amax(2) * (1 + 1e-5)).all()
    return out.double(), expected


@MODES
@pytest.mark.parametrize("slope", SLOPES)
@NAMES
def test_far_larger_keys_make_no_other_sum_vanish(name, slope, causal):
    """One reference for all positions would leave rows before a large key 0 / 0."""
    inputs = make_inputs(LENGTH).without_padding()
    # The exponent of a convolution is the sum over 8 channels by √8.
    key_L = SLOPES[slope](torch.arange(LENGTH)) / (math.sqrt(8) if name == "aft_conv" else 1)
    k_BHLK = key_L[:, None].float().double().expand_as(inputs.k_BHLK)
    out, expected = compared(*aft(name), inputs._replace(k_BHLK=k_BHLK), causal=causal)
    budget = 1e-5
    if name == "aft_conv":
        # The exponents are sums over 8 channels: their rounding is that of the weights.
        largest = float(SLOPES[slope](torch.arange(LENGTH)).abs().max())
        budget = error_bound(torch.float32, 1 + largest, math.sqrt(8))
    assert (out - expected).norm() <= budget * expected.norm()
    assert (out - expected).abs().amax() <= 10 * budget


@MODES
@pytest.mark.parametrize(
    ("name", "constant", "slope"),
    [("aft_full", 0, 3), ("aft_local", 0, 3), ("aft_local", -20, 0), ("aft_local", 20, 0)],
)
def test_extreme_biases_make_no_sum_vanish_and_cancel_nothing(name, constant, slope, causal):
    """With w_ij = 3j, later keys that a row does not see would have the largest weights by far.

    Σ e^k + Σ (e^w - 1) e^k, the short formula, loses what e^-20 leaves of a large near key.
    """
    case, mechanism = aft(name, rank=1)
    u, v = mechanism.parameters()
    u.data.fill_(1)
    v.data = constant + slope * torch.arange(LENGTH, dtype=torch.float64)[:, None]
    inputs = make_inputs(LENGTH).without_padding()
    inputs.k_BHLK[:, :, 50] += 20
    out, expected = compared(case, mechanism, inputs, causal=causal)
    assert (out - expected).norm() <= 1e-5 * expected.norm()


@MODES
@pytest.mark.parametrize("largest", [-200.0, -88.0, -87.0, -86.0])
def test_a_row_whose_weights_all_vanish_is_zero(largest, causal):
    """Compared with the bias 0 of distant pairs, e^-86 is 0 in float32, but never NaN."""
    _, mechanism = aft("aft_local", window=20, rank=1)
    for parameter, value in zip(mechanism.parameters(), (20.0, largest / 20), strict=True):
        parameter.data = torch.full_like(parameter, value)
    inputs = make_inputs(10).without_padding().to(torch.float32).differentiable()
    out = inputs.run(mechanism.float(), causal=causal)
    assert out.eq(0).all()
    gradients = torch.autograd.grad(out.sum(), [*inputs[:3], *mechanism.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
