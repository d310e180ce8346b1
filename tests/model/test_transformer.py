"""The transformer: sizes, choices, padding, causality, checkpointed activations."""

import itertools

import pytest
import torch
from omegaconf import OmegaConf

from protlm.attention import create
from protlm.config import Activation, ModelConfig, Norm, NormOrder, Positions
from protlm.data.vocabulary import VOCABULARY
from protlm.model.transformer import ProteinLM, num_parameters
from protlm.system.errors import UserError
from protlm.system.paths import conf_dir
from tests.rounding import error_bound


def preset(name: str, **changes: object) -> ModelConfig:
    schema = OmegaConf.structured(ModelConfig)
    config = OmegaConf.merge(schema, OmegaConf.load(conf_dir() / "model" / f"{name}.yaml"), changes)
    built = OmegaConf.to_object(config)
    assert isinstance(built, ModelConfig)
    return built


def network(config: ModelConfig, attention: str = "softmax", seed: int = 0) -> ProteinLM:
    def mechanism(layer: int):
        return create(
            attention,
            {},
            num_heads=config.num_heads,
            head_dim=config.model_dim // config.num_heads,
            model_dim=config.model_dim,
            max_length=config.max_length,
            seed=layer,
        )

    torch.manual_seed(seed)
    model = ProteinLM(config, vocab_size=len(VOCABULARY), pad=VOCABULARY.pad, mechanism=mechanism)
    return model.eval()


def example(batch: int = 2, length: int = 37) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(4, 24, (batch, length), generator=generator)
    return tokens_BL, torch.ones(batch, length, dtype=torch.bool)


@pytest.mark.parametrize("name", ["paper_36", "modern_36"])
def test_36_layers_are_76_million_parameters(name: str) -> None:
    config = preset(name)
    assert config.num_layers == 36
    assert round(num_parameters(network(config)) / 1e6) == 76


CHOICES = list(itertools.product(Positions, NormOrder, Norm))


@pytest.mark.parametrize("positions, order, norm", CHOICES)
@pytest.mark.parametrize("activation", Activation)
def test_every_choice_trains(
    positions: Positions, order: NormOrder, norm: Norm, activation: Activation
) -> None:
    config = preset("tiny", positions=positions, norm_order=order, norm=norm, activation=activation)
    model = network(config)
    logits_BLV = model(*example(), causal=False).logits_BLV
    logits_BLV.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(
        p.grad.abs().sum() > 0
        for n, p in model.named_parameters()
        if p.grad is not None and "bias" not in n
    )


@pytest.mark.parametrize("attention", ["softmax", "performer_relu", "performer_softmax"])
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_sequence_alone_and_in_a_batch_agree(attention: str, name: str) -> None:
    model = network(preset(name), attention)
    tokens_BL, mask_BL = example()
    with torch.no_grad():
        alone = model(tokens_BL[:1, :20], mask_BL[:1, :20], causal=False, layers=[2]).hidden[2]
        padded_BL, padded_mask_BL = tokens_BL.clone(), mask_BL.clone()
        padded_BL[0, 20:] = VOCABULARY.pad
        padded_mask_BL[0, 20:] = False
        batched = model(padded_BL, padded_mask_BL, causal=False, layers=[2]).hidden[2]
    torch.testing.assert_close(batched[:1, :20], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["softmax", "performer_relu", "performer_softmax"])
@pytest.mark.parametrize("positions", Positions)
def test_causal_logits_do_not_see_the_future(attention: str, positions: Positions) -> None:
    model = network(preset("tiny", positions=positions), attention)
    tokens_BL, mask_BL = example()
    changed_BL = tokens_BL.clone()
    changed_BL[:, 20:] = 4 + (changed_BL[:, 20:] - 3) % 20
    with torch.no_grad():
        before = model(tokens_BL, mask_BL, causal=True).logits_BLV
        after = model(changed_BL, mask_BL, causal=True).logits_BLV
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


@pytest.mark.parametrize("positions", Positions)
def test_order_matters(positions: Positions) -> None:
    model = network(preset("tiny", positions=positions))
    tokens_BL, mask_BL = example()
    with torch.no_grad():
        forward = model(tokens_BL, mask_BL, causal=False).logits_BLV
        backward = model(tokens_BL.flip(1), mask_BL, causal=False).logits_BLV.flip(1)
    assert not torch.allclose(forward, backward, atol=1e-3)


def test_rotary_depends_on_distance_only() -> None:
    model = network(preset("tiny", positions=Positions.rotary))
    tokens_BL, mask_BL = example()
    shifted_BL = torch.cat([torch.full((2, 9), VOCABULARY.pad), tokens_BL], dim=1)
    shifted_mask_BL = torch.cat([torch.zeros(2, 9, dtype=torch.bool), mask_BL], dim=1)
    with torch.no_grad():
        here = model(tokens_BL, mask_BL, causal=False).logits_BLV
        there = model(shifted_BL, shifted_mask_BL, causal=False).logits_BLV
    torch.testing.assert_close(there[:, 9:], here, atol=1e-4, rtol=1e-4)


def test_checkpointed_activations_give_the_same_gradients() -> None:
    config = preset("tiny", dropout=0.2)
    gradients = []
    for recompute in (False, True):
        model = network(config).train()
        model.activation_checkpointing = recompute
        torch.manual_seed(1)
        model(*example(), causal=False).logits_BLV.square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.equal(kept, recomputed)


def test_hidden_states_are_numbered_as_in_esm() -> None:
    model = network(preset("tiny"))
    tokens_BL, mask_BL = example()
    with torch.no_grad():
        out = model(tokens_BL, mask_BL, causal=False, layers=[0, 1, 2])
    torch.testing.assert_close(out.hidden[0], model.embedding(tokens_BL))
    torch.testing.assert_close(model.head(out.hidden[2]), out.logits_BLV)
    assert set(out.hidden) == {0, 1, 2}


def test_query_key_norms_of_a_performer_are_bounded() -> None:
    model = network(preset("small"), "performer_softmax")
    names = {name for name, _ in model.named_parameters() if "_norm.scale" in name}
    assert "blocks.0.attention.query_norm.scale" in names, "checkpoints have this name"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(50)
        inputs = next(model.attention_inputs(*example(), causal=False))[1]
    width = inputs.q_BHLK.shape[-1]
    squares = inputs.q_BHLK.square().sum(-1) / width**0.5
    # The squared norm is 3, up to the rounding of a mean and of a sum over the width.
    assert squares.max() <= 3.0 + error_bound(torch.float32, 3.0, 2 * width)


def test_query_key_norms_of_softmax_have_a_gain_without_a_bound() -> None:
    model = network(preset("small"), "softmax")
    inputs = next(model.attention_inputs(*example(), causal=False))[1]
    squares = inputs.q_BHLK.square().mean(-1)
    torch.testing.assert_close(squares, torch.ones_like(squares), rtol=1e-4, atol=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("query_norm.gain"):
                parameter.fill_(50)
    inputs = next(model.attention_inputs(*example(), causal=False))[1]
    squares = inputs.q_BHLK.square().mean(-1)
    torch.testing.assert_close(squares, torch.full_like(squares, 2500), rtol=1e-4, atol=0)


@pytest.mark.parametrize("attention", ["aft_simple", "rfa"])
def test_query_key_norms_do_nothing_for_mechanisms_that_need_none(attention: str) -> None:
    plain, normed = (network(preset("small", qk_norm=x), attention) for x in (False, True))
    assert plain.state_dict().keys() == normed.state_dict().keys()


@pytest.mark.parametrize(
    ("attention", "is_rotated"),
    [(name, False) for name in ("aft_simple", "aft_conv", "aft_full", "aft_local")]
    + [("softmax", True), ("rfa", True)],
)
def test_queries_and_keys_are_rotated_for_mechanisms_that_support_it(
    attention: str, is_rotated: bool
) -> None:
    model = network(preset("small", positions=Positions.rotary), attention)
    # The same token everywhere: before the rotation, all keys are equal.
    tokens_BL = torch.full((1, 5), VOCABULARY.pad + 5)
    inputs = next(model.attention_inputs(tokens_BL, tokens_BL > 0, causal=False))[1]
    for x_BHLK in (inputs.q_BHLK, inputs.k_BHLK):
        assert torch.allclose(x_BHLK[:, :, 0], x_BHLK[:, :, -1], rtol=1e-5) != is_rotated


def test_attention_inputs_are_those_of_the_forward_pass() -> None:
    model = network(preset("tiny"), "performer_relu")
    tokens_BL, mask_BL = example()
    seen = {}
    for number in (1, 2):
        model.mechanism(number).register_forward_pre_hook(
            lambda module, args, number=number: seen.__setitem__(number, args[0])
        )
    with torch.no_grad():
        for number, inputs in model.attention_inputs(tokens_BL, mask_BL, causal=False):
            asked = inputs.q_BHLK
            model(tokens_BL, mask_BL, causal=False)
            torch.testing.assert_close(asked, seen[number])


def test_too_long_an_input_is_a_user_error() -> None:
    model = network(preset("tiny", positions=Positions.learned, max_length=16))
    with pytest.raises(UserError, match="37 positions exceed the 16"):
        model(*example(), causal=False)


def test_sizes_that_do_not_fit_are_a_user_error() -> None:
    with pytest.raises(UserError, match="not a multiple"):
        network(preset("tiny", num_heads=3))
