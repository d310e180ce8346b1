"""Convolution, output gate, value embedding and U-net skips, around every mechanism."""

from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch import Tensor

from protlm.attention import mechanism, names
from protlm.attention.base import Recurrent
from protlm.config import ModelConfig
from protlm.model.block import Block
from protlm.model.layers import ShortConvolution
from protlm.model.transformer import ProteinLM, build_network
from protlm.system.errors import UserError
from protlm.system.paths import conf_dir

EXTRAS: dict[str, Any] = {
    "convolution": 5,
    "output_gate": True,
    "value_embedding": True,
    "unet_skips": True,
}
# Those that change nothing as long as they have not been trained.
SILENT = ["convolution", "value_embedding", "unet_skips"]
RECURRENT = [name for name in names() if issubclass(mechanism(name), Recurrent)]


def network(attention: str = "softmax", **changes: Any) -> ProteinLM:
    """The `tiny` model with 4 layers and the shipped settings of a mechanism, in float64."""
    settings = yaml.safe_load((conf_dir() / "attention" / f"{attention}.yaml").read_text())
    preset = OmegaConf.load(conf_dir() / "model" / "tiny.yaml")
    config = OmegaConf.merge(
        OmegaConf.structured(ModelConfig), preset, {"num_layers": 4, "max_length": 64, **changes}
    )
    built = OmegaConf.to_object(config)
    assert isinstance(built, ModelConfig)
    return build_network(built, settings, seed=0).double().eval()


def trained(model: ProteinLM) -> ProteinLM:
    """Returns the model with random values for parameters that start at 0 or 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("convolution", "value_embedding", "skips", "norm")):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise, alpha=0.3)
    return model


def example(length: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(4, 24, (batch, length), generator=generator)
    return tokens_BL, torch.ones(batch, length, dtype=torch.bool)


def logits(model: ProteinLM, tokens_BL: Tensor, mask_BL: Tensor, *, causal: bool) -> Tensor:
    with torch.inference_mode():
        return model(tokens_BL, mask_BL, causal=causal).logits_BLV


def is_causal(name: str) -> bool:
    return not mechanism(name).supports_bidirectional


@pytest.mark.parametrize("option", SILENT)
def test_options_that_start_at_zero_do_not_change_the_initial_model(option: str) -> None:
    plain, model = network(), network(**{option: EXTRAS[option]})
    model.load_state_dict(plain.state_dict(), strict=False)
    own = set(model.state_dict()) - set(plain.state_dict())
    assert own
    both = (logits(m, *example(30), causal=False) for m in (plain, model))
    torch.testing.assert_close(*both)
    before = logits(model, *example(30), causal=False)
    assert not torch.allclose(before, logits(trained(model), *example(30), causal=False))


@pytest.mark.parametrize("option", EXTRAS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_extra_is_trained(option: str, causal: bool) -> None:
    model = network(**{option: EXTRAS[option]})
    plain = set(network().state_dict())
    model(*example(30), causal=causal).logits_BLV.square().mean().backward()
    added = {n: p.grad for n, p in model.named_parameters() if n not in plain}
    assert added
    assert all(grad is not None and grad.abs().sum() > 0 for grad in added.values())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [3, 5, 7])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_the_convolution_follows_its_formula(width: int, length: int, causal: bool) -> None:
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


def test_the_gradients_of_the_convolution_follow_its_formula() -> None:
    layer = ShortConvolution(model_dim=5, width=5).double()
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    x_BLD = torch.randn(2, 8, 5, dtype=torch.float64, requires_grad=True)
    mask_BL = torch.tensor([[True] * 8, [True] * 6 + [False] * 2])
    for causal in (False, True):

        def run(x: Tensor, weight: Tensor, causal: bool = causal) -> Tensor:
            inputs = {"weight": weight}
            return torch.func.functional_call(layer, inputs, (x, mask_BL), {"causal": causal})

        assert torch.autograd.gradcheck(run, (x_BLD, layer.weight))


@pytest.mark.parametrize("attention", names())
def test_padding_changes_nothing(attention: str) -> None:
    model = trained(network(attention, **EXTRAS))
    causal = is_causal(attention)
    tokens_BL, mask_BL = example(29)
    padded_BL = torch.nn.functional.pad(tokens_BL, (0, 11), value=1)
    wider_BL = torch.nn.functional.pad(mask_BL, (0, 11))
    alone = logits(model, tokens_BL, mask_BL, causal=causal)
    among = logits(model, padded_BL, wider_BL, causal=causal)[:, :29]
    if attention in ("linformer", "nystromformer", "reformer", "bigbird"):
        # Their layout of positions depends on the length of a row.
        assert among.isfinite().all()
        other_BL = padded_BL.clone()
        other_BL[:, 29:] = 7
        again = logits(model, other_BL, wider_BL, causal=causal)[:, :29]
        torch.testing.assert_close(again, among, rtol=1e-10, atol=1e-10)
    else:
        torch.testing.assert_close(among, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attention", [name for name in names() if mechanism(name).supports_causal])
def test_the_future_is_not_seen(attention: str) -> None:
    model = trained(network(attention, **EXTRAS))
    tokens_BL, mask_BL = example(40)
    other_BL = tokens_BL.clone()
    other_BL[:, 25:] = (other_BL[:, 25:] - 3) % 20 + 4
    before, after = (logits(model, t, mask_BL, causal=True) for t in (tokens_BL, other_BL))
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.allclose(before[:, 25:], after[:, 25:])


@pytest.mark.parametrize("attention", RECURRENT)
def test_steps_are_the_causal_forward_pass(attention: str) -> None:
    model = trained(network(attention, **EXTRAS))
    tokens_BL, mask_BL = example(23, batch=3)
    expected = logits(model, tokens_BL, mask_BL, causal=True)
    state, found = model.initial_state(), []
    with torch.inference_mode():
        for tokens_B in tokens_BL[:, :12].unbind(dim=1):
            state, logits_BV = model.step(state, tokens_B)
            found.append(logits_BV)
        torch.testing.assert_close(
            torch.stack(found, dim=1), expected[:, :12], rtol=1e-9, atol=1e-9
        )
        # Samples leave the batch and change places.
        rows = torch.tensor([2, 0])
        state, found = state[rows], []
        for tokens_B in tokens_BL[rows, 12:].unbind(dim=1):
            state, logits_BV = model.step(state, tokens_B)
            found.append(logits_BV)
    torch.testing.assert_close(torch.stack(found, dim=1), expected[rows, 12:], rtol=1e-9, atol=1e-9)


def test_the_norm_of_the_gate_cancels_a_denominator() -> None:
    model = network(output_gate=True)
    block = model.blocks[0]
    assert isinstance(block, Block)
    mixed_BLHC = torch.randn(2, 7, 2, 32, dtype=torch.float64)
    hidden_BLD = torch.randn(2, 7, 64, dtype=torch.float64)
    factor_BLH1 = torch.rand(2, 7, 2, 1, dtype=torch.float64) + 0.5
    with torch.no_grad():
        one = block.attention._out(mixed_BLHC, hidden_BLD)
        other = block.attention._out(mixed_BLHC * factor_BLH1, hidden_BLD)
        gate, norm = block.attention.gate, block.attention.output_norm
        assert gate is not None and norm is not None
        gates_BLD = gate(hidden_BLD)
        root_BLH1 = mixed_BLHC.square().mean(-1, keepdim=True).sqrt()
        normed_BLD = (mixed_BLHC / root_BLH1 * norm.weight).flatten(2)
        by_hand = normed_BLD * gates_BLD * gates_BLD.sigmoid() @ block.attention.output.weight.T
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(one, by_hand, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_layers", [4, 5])
def test_skips_join_the_first_block_to_the_last(num_layers: int) -> None:
    model = trained(network(num_layers=num_layers, unet_skips=True))
    assert model.skips is not None
    seen: list[Tensor] = []
    hooks = [
        b.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for b in model.blocks
    ]
    with torch.no_grad():
        out = model(*example(9), causal=False, layers=range(num_layers))
    for hook in hooks:
        hook.remove()
    factors = model.skips.factors.detach()
    for n in range(num_layers):
        partner = num_layers - 1 - n
        added = factors[partner] * seen[partner] if partner < n else 0
        torch.testing.assert_close(seen[n], out.hidden[n] + added)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_inputs_are_those_of_the_forward_pass(causal: bool) -> None:
    model = trained(network(**EXTRAS))
    seen: list[Tensor] = []
    hooks = [
        model.mechanism(n).register_forward_pre_hook(lambda _, args: seen.append(args[2]))
        for n in range(1, 5)
    ]
    with torch.inference_mode():
        model(*example(9), causal=causal)
        expected, seen = seen, []
        asked = [x.v_BHLC for _, x in model.attention_inputs(*example(9), causal=causal)]
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(asked, expected)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"convolution": 4}, "model.convolution=5"),
        ({"convolution": 1}, "model.convolution=5"),
        ({"convolution": 33}, "3 to 31"),
    ],
)
def test_impossible_settings_are_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        network(**changes)
