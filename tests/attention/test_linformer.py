"""Linformer compared with softmax, its sharing options, shorter inputs, and its parameters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

from protlm.attention import create

SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16}
LENGTH = 40


def linformer(sharing: str, *, projected_length: int = 10, max_length: int = LENGTH) -> Any:
    """A Linformer in float64."""
    options = {"projected_length": projected_length, "sharing": sharing}
    return create("linformer", options, **SIZES, max_length=max_length).double()


def test_a_shorter_input_uses_the_first_columns_alone(make_inputs: Callable[..., Any]) -> None:
    mechanism = linformer("heads")
    inputs = make_inputs(15)
    before = inputs.run(mechanism, causal=False)
    with torch.no_grad():
        for projection in mechanism.parameters():
            projection[..., 15:] = torch.nan
    assert torch.equal(inputs.run(mechanism, causal=False), before)


def test_matrices_start_from_the_distribution_of_the_theorems() -> None:
    torch.manual_seed(0)
    mechanism = linformer("heads", projected_length=100, max_length=4000)
    e, f = mechanism.key_projection.flatten(), mechanism.value_projection.flatten()
    for drawn in (e, f):
        # 400,000 draws: four standard errors of the mean and of the variance.
        assert abs(drawn.mean()) < 4 * 0.1 / 400_000**0.5
        assert abs(drawn.square().mean() / 0.01 - 1) < 4 * (2 / 400_000) ** 0.5
    assert abs(torch.corrcoef(torch.stack([e, f]))[0, 1]) < 4 / 400_000**0.5


def sharing_layers() -> Any:
    """Creates three layers; the second and the third use the parameters of the first."""
    made = [linformer("layers") for _ in range(3)]
    for later in made[1:]:
        later.share_with(made[0])
    return nn.ModuleList(made)


def test_layers_that_share_have_their_parameter_once(make_inputs: Callable[..., Any]) -> None:
    layers = sharing_layers()
    assert list(layers.state_dict()) == ["0.key_projection"]
    assert [name for name, _ in layers.named_parameters()] == ["0.key_projection"]
    # safetensors refuses tensors that share their memory.
    assert len(save(layers.state_dict())) < 1.1 * 8 * 10 * LENGTH
    fresh = sharing_layers()
    fresh.load_state_dict(layers.state_dict(), assign=True)
    inputs = make_inputs(LENGTH)
    out = inputs.run(layers[0], causal=False)
    assert all(torch.equal(inputs.run(layer, causal=False), out) for layer in fresh)


def test_layers_that_share_compute_and_learn_alike(make_inputs: Callable[..., Any]) -> None:
    layers, inputs = sharing_layers(), make_inputs(LENGTH)
    outputs = [inputs.run(layer, causal=False) for layer in layers]
    assert torch.equal(outputs[0], outputs[1])
    outputs[0].sum().backward()
    once = layers[0].key_projection.grad.clone()
    (outputs[1].sum() + outputs[2].sum()).backward()
    torch.testing.assert_close(layers[0].key_projection.grad, 3 * once)


def test_a_copy_of_layers_that_share_shares_within_itself(make_inputs: Callable[..., Any]) -> None:
    layers, inputs = sharing_layers(), make_inputs(LENGTH).to(torch.float32)
    before = inputs.to(torch.float64).run(layers[2], causal=False)
    twin = copy.deepcopy(layers).float()
    with torch.no_grad():
        twin[0].key_projection.mul_(2)
    first, last = (inputs.run(twin[i], causal=False) for i in (0, 2))
    assert torch.equal(first, last)
    assert not torch.allclose(first, before.float())
    assert torch.equal(inputs.to(torch.float64).run(layers[2], causal=False), before)


@pytest.mark.parametrize("sharing", ["none", "heads", "key_value"])
def test_other_layers_keep_their_own(sharing: str, make_inputs: Callable[..., Any]) -> None:
    first, second = linformer(sharing), linformer(sharing)
    own = [p.clone() for p in second.parameters()]
    second.share_with(first)
    assert all(torch.equal(a, b) for a, b in zip(own, second.parameters(), strict=True))
    inputs = make_inputs(LENGTH)
    assert not torch.allclose(inputs.run(first, causal=False), inputs.run(second, causal=False))
