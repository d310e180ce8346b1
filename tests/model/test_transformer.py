"""The transformer: sizes, choices, and optional parts around every mechanism."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import mechanism, names
from protlm.config import Activation, Norm, NormOrder, Positions
from protlm.data.vocabulary import VOCABULARY
from protlm.model.transformer import ProteinLM, num_parameters
from protlm.system.errors import UserError
from tests.marks import slow_but
from tests.rounding import error_bound
from tests.small_models import network_of, random_tokens

SOFTMAX = "attention=softmax"
EXTRAS: dict[str, Any] = {
    "convolution": 5,
    "output_gate": True,
    "value_embedding": True,
    "unet_skips": True,
}
CHOICES = list(itertools.product(Positions, NormOrder, Norm, Activation))
# Those that change nothing as long as they have not been trained.
SILENT = ["convolution", "value_embedding", "unet_skips"]
# Their layout of positions depends on the length of a row.
BY_LENGTH = ("linformer", "nystromformer", "reformer", "bigbird")


def network(attention: str = "softmax", **changes: Any) -> ProteinLM:
    """The `tiny` model with 4 layers, in float64."""
    settings = {"num_layers": 4, "max_length": 64, **changes}
    return network_of(f"attention={attention}", **settings).double()


def trained(model: ProteinLM) -> ProteinLM:
    """Returns the model with random values for parameters that start at 0 or 1."""
    generator = torch.Generator().manual_seed(1)
    parts = ("convolution", "value_embedding", "skips", "norm", "bias")
    for name, parameter in model.named_parameters():
        if any(part in name for part in parts):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.add_(noise, alpha=0.3)
    return model


@torch.inference_mode()
def logits(model: ProteinLM, tokens_BL: Tensor, mask_BL: Tensor, *, causal: bool) -> Tensor:
    return model(tokens_BL, mask_BL, causal=causal).logits_BLV


MODELS_OF_36 = {"paper_36": "softmax", "modern_36": "softmax", "hybrid_36": "hybrid"}


@pytest.mark.parametrize("name", slow_but(MODELS_OF_36, "hybrid_36"))
def test_36_layers_are_76_million_parameters(name):
    model = network_of(f"model={name}", f"attention={MODELS_OF_36[name]}")
    assert model.num_layers == 36
    assert round(num_parameters(model) / 1e6) == 76
    assert isinstance(model.mechanism(36), mechanism(MODELS_OF_36[name]))


@pytest.mark.parametrize("positions, order, norm, activation", slow_but(CHOICES, *CHOICES[::15]))
def test_every_choice_trains(positions, order, norm, activation):
    choices = {"positions": positions, "norm_order": order, "norm": norm, "activation": activation}
    model = network_of(SOFTMAX, **choices)
    model(*random_tokens(37), causal=False).logits_BLV.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0 or "bias" in name, name


@pytest.mark.parametrize("positions", Positions)
def test_order_matters(positions):
    model = network_of(SOFTMAX, positions=positions)
    tokens_BL, mask_BL = random_tokens(37)
    forward = logits(model, tokens_BL, mask_BL, causal=False)
    backward = logits(model, tokens_BL.flip(1), mask_BL, causal=False).flip(1)
    assert not torch.allclose(forward, backward, atol=1e-3)


def test_checkpointed_activations_give_the_same_gradients():
    gradients = []
    for recompute in ("false", "true"):
        setting = f"trainer.activation_checkpointing={recompute}"
        model = network_of(SOFTMAX, setting, dropout=0.2).train()
        torch.manual_seed(1)
        model(*random_tokens(37), causal=False).logits_BLV.square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_hidden_states_are_numbered_as_in_esm():
    model = network_of(SOFTMAX)
    tokens_BL, mask_BL = random_tokens(37)
    with torch.no_grad():
        out = model(tokens_BL, mask_BL, causal=False, layers=[0, 1, 2])
    torch.testing.assert_close(out.hidden[0], model.embedding(tokens_BL))
    torch.testing.assert_close(model.head(out.hidden[2]), out.logits_BLV)
    assert set(out.hidden) == {0, 1, 2}


def test_query_key_norms_of_a_performer_are_bounded():
    model = network_of("model=small", "attention=performer_softmax")
    names = {name for name, _ in model.named_parameters() if "_norm.scale" in name}
    assert "blocks.0.attention.query_norm.scale" in names, "checkpoints have this name"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(50)
        inputs = next(model.attention_inputs(*random_tokens(37), causal=False))[1]
    width = inputs.q_BHLK.shape[-1]
    squares = inputs.q_BHLK.square().sum(-1) / width**0.5
    # The squared norm is 3, up to the rounding of a mean and of a sum over the width.
    assert squares.max() <= 3.0 + error_bound(torch.float32, 3.0, 2 * width)


def test_query_key_norms_of_softmax_have_a_gain_without_a_bound():
    model = network_of("model=small", SOFTMAX)
    for gain in (1.0, 50.0):
        for name, parameter in model.named_parameters():
            if name.endswith("query_norm.gain"):
                assert gain != 1.0 or (parameter == 1).all()
                parameter.data.fill_(gain)
        inputs = next(model.attention_inputs(*random_tokens(37), causal=False))[1]
        squares = inputs.q_BHLK.square().mean(-1)
        torch.testing.assert_close(squares, torch.full_like(squares, gain**2), rtol=1e-4, atol=0)


@pytest.mark.parametrize("attention", ["aft_simple", "rfa"])
def test_query_key_norms_do_nothing_for_mechanisms_that_need_none(attention):
    plain, normed = (network(attention, qk_norm=has_norm) for has_norm in (False, True))
    assert plain.state_dict().keys() == normed.state_dict().keys()


@pytest.mark.parametrize(
    ("attention", "is_rotated"),
    [
        *((name, False) for name in ("aft_simple", "aft_conv", "aft_full", "aft_local")),
        ("softmax", True),
        ("rfa", True),
    ],
)
def test_queries_and_keys_are_rotated_for_mechanisms_that_support_it(attention, is_rotated):
    model = network(attention, positions="rotary")
    # The same token everywhere: before the rotation, all keys are equal.
    tokens_BL = torch.full((1, 5), VOCABULARY.pad + 5)
    inputs = next(model.attention_inputs(tokens_BL, tokens_BL > 0, causal=False))[1]
    for x_BHLK in (inputs.q_BHLK, inputs.k_BHLK):
        assert torch.allclose(x_BHLK[:, :, 0], x_BHLK[:, :, -1], rtol=1e-5) != is_rotated


@pytest.mark.parametrize("option", SILENT)
def test_options_that_start_at_zero_do_not_change_the_initial_model(option):
    plain, model = network(), network(**{option: EXTRAS[option]})
    model.load_state_dict(plain.state_dict(), strict=False)
    assert set(model.state_dict()) - set(plain.state_dict())
    before = logits(model, *random_tokens(30), causal=False)
    torch.testing.assert_close(before, logits(plain, *random_tokens(30), causal=False))
    assert not torch.allclose(before, logits(trained(model), *random_tokens(30), causal=False))


@pytest.mark.parametrize("option", slow_but(EXTRAS, "output_gate"))
@pytest.mark.parametrize("causal", [False, True])
def test_every_extra_is_trained(option, causal):
    model = network(**{option: EXTRAS[option]})
    plain = set(network().state_dict())
    model(*random_tokens(30), causal=causal).logits_BLV.square().mean().backward()
    added = {n: p.grad for n, p in model.named_parameters() if n not in plain}
    assert added
    assert all(grad is not None and grad.abs().sum() > 0 for grad in added.values())


@pytest.mark.parametrize("attention", slow_but(names(), "softmax", "performer_relu", "bigbird"))
def test_padding_changes_nothing(attention):
    model = trained(network(attention, **EXTRAS))
    causal = not mechanism(attention).supports_bidirectional
    tokens_BL, mask_BL = random_tokens(29)
    padded_BL = torch.nn.functional.pad(tokens_BL, (0, 11), value=1)
    wider_BL = torch.nn.functional.pad(mask_BL, (0, 11))
    among = logits(model, padded_BL, wider_BL, causal=causal)[:, :29]
    if attention in BY_LENGTH:
        padded_BL[:, 29:] = 7
        again = logits(model, padded_BL, wider_BL, causal=causal)[:, :29]
        torch.testing.assert_close(again, among, rtol=1e-10, atol=1e-10)
        assert among.isfinite().all()
    else:
        alone = logits(model, tokens_BL, mask_BL, causal=causal)
        torch.testing.assert_close(among, alone, rtol=1e-9, atol=1e-9)


CAUSAL = [(name, "rotary") for name in names() if mechanism(name).supports_causal]
CAUSAL += [("softmax", "learned"), ("performer_relu", "sinusoidal")]


@pytest.mark.parametrize("attention, positions", slow_but(CAUSAL, ("rfa", "rotary"), *CAUSAL[-2:]))
def test_the_future_is_not_seen(attention, positions):
    model = trained(network(attention, positions=positions, **EXTRAS))
    tokens_BL, mask_BL = random_tokens(40)
    other_BL = tokens_BL.clone()
    other_BL[:, 25:] = (other_BL[:, 25:] - 3) % 20 + 4
    before, after = (logits(model, t, mask_BL, causal=True) for t in (tokens_BL, other_BL))
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.allclose(before[:, 25:], after[:, 25:])


def test_the_norm_of_the_gate_cancels_a_denominator():
    block = network(output_gate=True).blocks[0]
    mixed_BLHC = torch.randn(2, 7, 2, 32, dtype=torch.float64)
    hidden_BLD = torch.randn(2, 7, 64, dtype=torch.float64)
    factor_BLH1 = torch.rand(2, 7, 2, 1, dtype=torch.float64) + 0.5
    with torch.no_grad():
        one = block.attention._out(mixed_BLHC, hidden_BLD)
        other = block.attention._out(mixed_BLHC * factor_BLH1, hidden_BLD)
        gate, norm = block.attention.gate, block.attention.output_norm
        gates_BLD = gate(hidden_BLD)
        root_BLH1 = mixed_BLHC.square().mean(-1, keepdim=True).sqrt()
        normed_BLD = (mixed_BLHC / root_BLH1 * norm.weight).flatten(2)
        by_hand = normed_BLD * gates_BLD * gates_BLD.sigmoid() @ block.attention.output.weight.T
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(one, by_hand, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_layers", [4, 5])
def test_skips_join_the_first_block_to_the_last(num_layers):
    model = trained(network(num_layers=num_layers, unet_skips=True))
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        out = model(*random_tokens(9), causal=False, layers=range(num_layers))
    factors = model.skips.factors.detach()
    for n in range(num_layers):
        partner = num_layers - 1 - n
        added = factors[partner] * seen[partner] if partner < n else 0
        torch.testing.assert_close(seen[n], out.hidden[n] + added)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_inputs_are_those_of_the_forward_pass(causal):
    model = trained(network(**EXTRAS))
    seen: list[tuple[Tensor, ...]] = []
    for n in range(1, 5):
        model.mechanism(n).register_forward_pre_hook(lambda _, args: seen.append(args))
    logits(model, *random_tokens(9), causal=causal)
    expected = seen.copy()
    with torch.inference_mode():
        asked = [*model.attention_inputs(*random_tokens(9), causal=causal)]
    found = [(x.q_BHLK, x.k_BHLK, x.v_BHLC) for _, x in asked]
    torch.testing.assert_close(found, [given[:3] for given in expected])


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"convolution": 4}, "model.convolution=5"),
        ({"convolution": 1}, "model.convolution=5"),
        ({"convolution": 33}, "3 to 31"),
        ({"num_heads": 3}, "not a multiple"),
        ({"feedforward_chunk": 0}, r"model\.feedforward_chunk=0 must be at least 1"),
        ({"feedforward_chunk": -5}, r"model\.feedforward_chunk=-5 must be at least 1"),
    ],
)
def test_impossible_settings_are_rejected(changes, words):
    with pytest.raises(UserError, match=words):
        network(**changes)
