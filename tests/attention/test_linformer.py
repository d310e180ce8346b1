"""Linformer compared with softmax, its sharing options, shorter inputs, and its parameters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from protlm.attention import create
from protlm.system.errors import UserError

SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16}
LENGTH = 40


def linformer(sharing: str, *, projected_length: int = 10, max_length: int = LENGTH) -> Any:
    """A Linformer in float64."""
    options = {"projected_length": projected_length, "sharing": sharing}
    return create("linformer", options, **SIZES, max_length=max_length).double()


def set_projections(mechanism: Any, keys: Tensor, values: Tensor | None = None) -> None:
    """Sets the matrices of every head of a mechanism; it may have none for values."""
    with torch.no_grad():
        mechanism.key_projection.copy_(keys)
        if mechanism.value_projection is not None:
            mechanism.value_projection.copy_(keys if values is None else values)


@pytest.mark.parametrize("sharing", ["none", "heads", "key_value", "layers"])
def test_as_many_mixtures_as_positions_that_mix_nothing_are_softmax(
    sharing: str, make_inputs: Callable[..., Any]
) -> None:
    mechanism = linformer(sharing, projected_length=LENGTH)
    set_projections(mechanism, torch.eye(LENGTH))
    inputs = make_inputs(LENGTH).without_padding()
    softmax = create("softmax", {}, **SIZES, max_length=LENGTH)
    expected = inputs.run(softmax, causal=False)
    torch.testing.assert_close(inputs.run(mechanism, causal=False), expected)


def test_the_order_of_positions_is_in_the_columns_only(make_inputs: Callable[..., Any]) -> None:
    mechanism, permuted = linformer("none"), linformer("none")
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        permuted.key_projection.copy_(mechanism.key_projection[..., order])
        permuted.value_projection.copy_(mechanism.value_projection[..., order])
    inputs = make_inputs(LENGTH)
    moved = type(inputs)(*(x[..., order, :] for x in inputs[:4]), inputs.mask_BL[:, order])
    out = inputs.run(mechanism, causal=False)
    torch.testing.assert_close(moved.run(permuted, causal=False), out[:, :, order])
    assert not torch.allclose(moved.run(mechanism, causal=False), out[:, :, order])


def test_ways_to_share_are_one_mechanism_where_the_matrices_are_equal(
    make_inputs: Callable[..., Any],
) -> None:
    inputs = make_inputs(LENGTH)
    drawn = torch.randn(10, LENGTH, dtype=torch.float64)
    outputs, gradients = [], []
    for sharing in ("none", "heads", "key_value", "layers"):
        mechanism = linformer(sharing)
        set_projections(mechanism, drawn)
        outputs.append(inputs.run(mechanism, causal=False))
        outputs[-1].square().sum().backward()
        # The gradient of a shared projection is the sum over its uses.
        gradients.append(sum(p.grad.sum(0) for p in mechanism.parameters()))
    for out, gradient in zip(outputs, gradients, strict=True):
        torch.testing.assert_close(out, outputs[0])
        torch.testing.assert_close(gradient, gradients[0])


@pytest.mark.parametrize(
    ("sharing", "expected"),
    [("none", 2 * 2), ("heads", 2), ("key_value", 1), ("layers", 1)],
)
def test_numbers_of_matrices(sharing: str, expected: int) -> None:
    mechanism = linformer(sharing)
    assert sum(p.numel() for p in mechanism.parameters()) == expected * 10 * LENGTH


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


def test_autocast_changes_nothing(make_inputs: Callable[..., Any]) -> None:
    inputs = make_inputs(40).to(torch.float32)
    ours = linformer("heads").float()
    with torch.autocast("cpu", torch.bfloat16):
        out = inputs.run(ours, causal=False)
    assert torch.equal(out, inputs.run(ours, causal=False))


def test_no_tensor_grows_with_the_square_of_the_length(largest_tensor: Any) -> None:
    largest = []
    for length in (512, 1024):
        mechanism = linformer("none", projected_length=16, max_length=length).float()
        vectors = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
        mask_BL = torch.arange(length)[None] < length - 7
        largest_tensor.numel = 0
        with largest_tensor:
            out = mechanism(*vectors, hidden_BLD=vectors[0][:, 0], mask_BL=mask_BL, causal=False)
            out.square().sum().backward()
        largest.append(largest_tensor.numel)
    assert largest == [2 * 16 * 512, 2 * 16 * 1024]


def test_a_longer_input_is_refused(make_inputs: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="41 positions exceed the 40"):
        make_inputs(41).run(linformer("layers"), causal=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projected_length": 0}, "attention.projected_length=0 must be at least 1; type"),
        ({"sharing": "all"}, "attention.sharing=all does not exist; there are: heads, key_value"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        create("linformer", options, **SIZES, max_length=LENGTH)
