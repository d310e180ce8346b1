"""Longformer, BigBird, long-short and hybrid attention: their maps, parameters and layers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import create
from protlm.attention.ops import block_sparse
from protlm.attention.performer_relu import PerformerRelu
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.model.transformer import build_network
from protlm.system.errors import UserError
from tests.attention.cases import find_case, make_inputs

SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16, "max_length": 512}
MODES = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


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


def test_a_hybrid_suggests_suitable_mechanisms_alone():
    with pytest.raises(UserError) as error:
        create("hybrid", {"mechanism": "softmax"}, **SIZES)
    offered = str(error.value).split("there are: ")[1].split(", ")
    assert {"performer_relu", "performer_softmax"} <= set(offered)
    assert not {"softmax", "hybrid", "longformer"} & set(offered)


def test_the_settings_of_the_mechanism_can_be_typed():
    config = compose(TrainConfig, ["attention=hybrid", "+attention.options.num_features=64"])
    assert config.attention["options"] == {"num_features": 64}
