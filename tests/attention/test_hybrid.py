"""Hybrid heads: each kind equals the mechanism alone, and settings reach the linear one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from protlm.attention import Attention, create
from protlm.attention.base import RandomFeatures, Recurrent
from protlm.attention.performer_relu import PerformerRelu
from protlm.composition import compose
from protlm.config import TrainConfig
from protlm.system.errors import UserError

SIZES = {"head_dim": 8, "model_dim": 16, "max_length": 512}


def hybrid(*, num_heads: int = 2, **options: Any) -> Attention:
    """A small hybrid in float64."""
    return create("hybrid", options, num_heads=num_heads, seed=3, **SIZES).double()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("local_heads", [1, 3])
def test_heads_are_a_window_and_the_mechanism_alone(
    local_heads: int, causal: bool, make_inputs: Callable[..., Any]
) -> None:
    inputs = make_inputs(130)
    inputs = inputs._replace(
        **{name: getattr(inputs, name).repeat(1, 2, 1, 1) for name in inputs._fields[:3]}
    )
    settings = {"num_features": 20, "kernel_epsilon": 0.1}
    both = hybrid(num_heads=4, local_heads=local_heads, window=32, options=settings)
    window = create("longformer", {"window": 32, "num_global": 0}, num_heads=local_heads, **SIZES)
    performer = create("performer_relu", settings, num_heads=4 - local_heads, seed=3, **SIZES)
    near, far = (
        inputs._replace(**{name: getattr(inputs, name)[:, heads] for name in inputs._fields[:3]})
        for heads in (slice(0, local_heads), slice(local_heads, 4))
    )
    expected = [near.run(window, causal=causal), far.run(performer.double(), causal=causal)]
    out = inputs.run(both, causal=causal)
    torch.testing.assert_close(out, torch.cat(expected, dim=1))


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_over_everything_is_softmax(causal: bool, make_inputs: Callable[..., Any]) -> None:
    inputs = make_inputs(100)
    softmax = create("softmax", {}, num_heads=2, **SIZES)
    out = inputs.run(hybrid(window=200), causal=causal)
    torch.testing.assert_close(out[:, :1], inputs.run(softmax, causal=causal)[:, :1])


def test_a_redraw_finds_the_inner_mechanism(make_inputs: Callable[..., Any]) -> None:
    inputs = make_inputs(40)
    both = hybrid(window=8, options={"num_features": 20, "redraw_every": 5})
    (inner,) = [module for module in both.modules() if isinstance(module, RandomFeatures)]
    before = inputs.run(both, causal=False)
    inner.redraw(1)
    after = inputs.run(both, causal=False)
    assert torch.equal(before[:, :1], after[:, :1])
    assert not torch.equal(before[:, 1:], after[:, 1:])


def test_modes_are_those_of_the_mechanism() -> None:
    assert hybrid().supports_bidirectional and hybrid().supports_causal
    gated = hybrid(mechanism="rfa", options={"gate": True})
    assert gated.supports_causal and not gated.supports_bidirectional


@pytest.mark.parametrize("mechanism", ["aft_simple", "linear", "performer_softmax", "rfa"])
def test_every_linear_mechanism_steps_beside_a_window(
    mechanism: str, make_inputs: Callable[..., Any]
) -> None:
    inputs = make_inputs(30).without_padding()
    both = hybrid(window=6, mechanism=mechanism)
    assert isinstance(both, Recurrent)
    state = both.initial_state(inputs.k_BHLK[:, :, 0], inputs.v_BHLC[:, :, 0])
    outs = []
    for position in range(30):
        at = (x[:, :, position] for x in inputs[:3])
        state, out_BHC = both.step(state, *at, hidden_BD=inputs.hidden_BLD[:, position])
        outs.append(out_BHC)
    torch.testing.assert_close(torch.stack(outs, dim=2), inputs.run(both, causal=True))


def test_the_longest_input_is_that_of_the_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hybrid().max_length is None
    monkeypatch.setattr(PerformerRelu, "max_length", 99)
    assert hybrid().max_length == 99


def test_a_state_keeps_the_window_only() -> None:
    q, k, v = torch.randn(3, 2, 2, 8)
    both = hybrid(window=6).float()
    assert isinstance(both, Recurrent)
    state = both.initial_state(k, v)
    for _ in range(20):
        state, _ = both.step(state, q, k, v, hidden_BD=torch.zeros(2, 16))
    assert state.window.k_BHMK.shape == state.window.v_BHMC.shape == (2, 1, 7, 8)


@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_the_length_only(causal: bool, largest_tensor: Any) -> None:
    mechanism = hybrid(window=128).float()
    sizes = []
    for length in (1024, 4096):
        q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
        mask_BL = torch.arange(length)[None] < length - 7
        hidden_BLD = torch.randn(1, length, 16)
        largest_tensor.numel = 0
        with largest_tensor:
            out = mechanism(q, k, v, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal)
            out.square().sum().backward()
        sizes.append(largest_tensor.numel)
    assert sizes[0] < 1024 * 256
    assert sizes[1] <= 4.2 * sizes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_heads": 0}, r"attention\.local_heads=0 .* between 1 and 1 of the 2 heads"),
        ({"local_heads": 2}, r"attention\.local_heads=2 must leave a head of either kind"),
        ({"window": 5}, r"attention\.window=5 must be even"),
        ({"mechanism": "softmax"}, r"attention\.mechanism=softmax is not .*: .*performer_relu"),
        ({"mechanism": "hybrid"}, r"attention\.mechanism=hybrid is not a linear mechanism"),
        ({"mechanism": "longformer"}, r"attention\.mechanism=longformer is not a linear"),
        ({"mechanism": "linaer"}, r"attention\.mechanism=linaer is not a linear mechanism"),
        ({"options": {"color": 1}}, r"^attention\.options\.color is not a setting of performer"),
        (
            {"options": {"num_features": "x"}},
            r"^attention\.options\.num_features=x must be a whole number",
        ),
        (
            {"options": {"num_features": -4}},
            r"^attention\.options\.num_features=-4 .*type attention\.options\.num_features=256",
        ),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        hybrid(**options)


def test_unsuitable_mechanisms_are_not_suggested() -> None:
    with pytest.raises(UserError) as error:
        hybrid(mechanism="softmax")
    offered = str(error.value).split("there are: ")[1].split(", ")
    assert {"performer_relu", "performer_softmax"} <= set(offered)
    assert not {"softmax", "hybrid", "longformer"} & set(offered)


def test_the_settings_of_the_mechanism_can_be_typed() -> None:
    config = compose(TrainConfig, ["attention=hybrid", "+attention.options.num_features=64"])
    assert config.attention["options"] == {"num_features": 64}
