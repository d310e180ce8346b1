"""Long-short attention: its limits, visible positions, map, memory and settings."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention import create, long_short
from protlm.attention.long_short import LongShort
from protlm.attention.ops.chunk_summaries import summary_weights
from protlm.system.errors import UserError

HEADS, DIM = 2, 8
OPTIONS = {"window": 16, "rank": 3, "chunk": 8, "memory": 24, "dual_norm": True}


def make(*, model_dim: int = 16, **options: Any) -> LongShort:
    sizes = {"num_heads": HEADS, "head_dim": DIM, "model_dim": model_dim, "max_length": 99}
    torch.manual_seed(1)
    mechanism = create("long_short", {**OPTIONS, **options}, **sizes).double()
    assert isinstance(mechanism, LongShort)
    return mechanism


def draw_norms(mechanism: LongShort) -> None:
    """Draws LayerNorms such as training may yield."""
    for norm in (mechanism.near_norm, mechanism.far_norm):
        if norm is not None:
            torch.nn.init.normal_(norm.weight, mean=1, std=0.3)
            torch.nn.init.normal_(norm.bias, std=0.3)


def normalized(x_BHLK: Tensor, norm: Any) -> Tensor:
    """The LayerNorm of all heads' channels of a position."""
    x_BLE = norm(x_BHLK.transpose(1, 2).flatten(2))
    return x_BLE.unflatten(-1, (HEADS, DIM)).transpose(1, 2)


def dense_softmax(inputs: Any, multiplicity_LL: Tensor) -> Tensor:
    """Softmax in which query i counts key j as often as the entry (i, j) says."""
    logits_BHLL = inputs.q_BHLK @ inputs.k_BHLK.mT / math.sqrt(DIM)
    return (logits_BHLL + multiplicity_LL.log()).softmax(dim=-1) @ inputs.v_BHLC


def map_of(mechanism: LongShort, inputs: Any, *, causal: bool) -> Tensor:
    q, k, _, hidden_BLD, mask_BL = inputs
    return mechanism.attention_map(q, k, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal)


def in_segments(length: int, window: int) -> Tensor:
    """Whether a position is in another's segment or within half a segment of it, LL."""
    position_L = torch.arange(length)
    start_L1 = (position_L // window * window)[:, None]
    first, end = start_L1 - window // 2, start_L1 + window + window // 2
    return (first <= position_L) & (position_L < end)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 70])
def test_without_summaries_a_window_over_everything_is_softmax(
    causal: bool, length: int, make_inputs: Callable[..., Any]
) -> None:
    inputs = make_inputs(length)
    softmax = create("softmax", {}, num_heads=2, head_dim=8, model_dim=16, max_length=length)
    plain = make(rank=0, window=length, dual_norm=False)
    expected = inputs.run(softmax, causal=causal)
    torch.testing.assert_close(inputs.run(plain, causal=causal), expected)
    norms = make(rank=0, window=length)
    draw_norms(norms)
    assert norms.near_norm is not None
    k_BHLK, v_BHLC = (normalized(x, norms.near_norm) for x in inputs[1:3])
    expected = inputs._replace(k_BHLK=k_BHLK, v_BHLC=v_BHLC).run(softmax, causal=causal)
    torch.testing.assert_close(inputs.run(norms, causal=causal), expected)


@pytest.mark.parametrize("window", [6, 64])
def test_summaries_of_one_position_each_double_the_keys(
    window: int, make_inputs: Callable[..., Any]
) -> None:
    length = 20
    mechanism = make(model_dim=length, rank=length, window=window, dual_norm=False)
    assert mechanism.projection is not None
    # P is the identity: summary p has all its weight at position p.
    with torch.no_grad():
        mechanism.projection.copy_(torch.eye(length).repeat(1, HEADS))
    one_hot = 1e3 * torch.eye(length, dtype=torch.float64).expand(3, -1, -1)
    inputs = make_inputs(length).without_padding()._replace(hidden_BLD=one_hot)
    expected = dense_softmax(inputs, 1.0 + in_segments(length, window))
    torch.testing.assert_close(inputs.run(mechanism, causal=False), expected)
    if window > length:
        torch.testing.assert_close(expected, F.scaled_dot_product_attention(*inputs[:3]))


@pytest.mark.parametrize("memory", [None, 5, 100])
def test_summaries_of_chunks_of_one_are_the_keys_before(
    memory: int | None, make_inputs: Callable[..., Any]
) -> None:
    length, window = 200, 7
    mechanism = make(rank=1, chunk=1, window=window, memory=memory, dual_norm=False)
    inputs = make_inputs(length).without_padding()
    position_L = torch.arange(length)
    distance_LL = position_L[:, None] - position_L
    near = (distance_LL >= 0) & (distance_LL < window)
    far = (distance_LL > 0) & (distance_LL <= (length if memory is None else memory))
    expected = dense_softmax(inputs, near.double() + far.double())
    torch.testing.assert_close(inputs.run(mechanism, causal=True), expected)


def test_both_ways_a_position_sees_its_segment_and_half_of_those_beside(
    make_inputs: Callable[..., Any],
) -> None:
    inputs = make_inputs(100).without_padding()
    near = map_of(make(rank=0), inputs, causal=False) > 0
    assert torch.equal(near, in_segments(100, 16).expand_as(near))
    assert (map_of(make(), inputs, causal=False) > 0).all()


@pytest.mark.parametrize(("window", "chunk", "memory"), [(16, 8, 24), (16, 8, 17), (3, 8, None)])
def test_causally_a_position_sees_its_window_and_earlier_chunks(
    window: int, chunk: int, memory: int | None, make_inputs: Callable[..., Any]
) -> None:
    mechanism = make(window=window, chunk=chunk, memory=memory)
    seen = map_of(mechanism, make_inputs(150).without_padding(), causal=True) > 0
    for i in range(150):
        near = set(range(max(0, i - window + 1), i + 1))
        own_chunk = i // chunk * chunk
        # Seventeen positions are rounded up to three chunks of eight.
        reach = own_chunk if memory is None else 24
        far = set(range(max(0, own_chunk - reach), own_chunk))
        for row_L in seen[:, :, i].flatten(0, 1):
            assert set(row_L.nonzero().flatten().tolist()) == near | far


@pytest.mark.parametrize("causal", [False, True])
def test_a_chunk_of_padding_is_not_visible(causal: bool, make_inputs: Callable[..., Any]) -> None:
    """A residue of a late chunk sees no summary: all before it is padding."""
    mechanism = make(window=1)
    draw_norms(mechanism)
    mask_BL = torch.arange(65).expand(3, 65) == 64
    inputs = make_inputs(65).without_padding()._replace(mask_BL=mask_BL)
    alone = type(inputs)(*(x[..., 64:, :] for x in inputs[:4]), mask_BL[:, 64:])
    out = inputs.run(mechanism, causal=causal)
    torch.testing.assert_close(out[:, :, 64:], alone.run(mechanism, causal=causal))
    assert not out[:, :, :64].any()


def test_summaries_weigh_the_true_positions_of_their_chunk() -> None:
    mask_BL = torch.tensor([[True, True, False, True, True]])
    weights_BHSMP = summary_weights(torch.zeros(1, 1, 5, 1), mask_BL, chunk=3)
    expected = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    assert torch.equal(weights_BHSMP[0, 0, :, :, 0], expected)


def test_the_map_has_the_weights_of_normalized_keys(make_inputs: Callable[..., Any]) -> None:
    mechanism = make(window=40)
    draw_norms(mechanism)
    inputs = make_inputs(40).without_padding()
    assert mechanism.projection is not None
    scores = (inputs.hidden_BLD @ mechanism.projection).unflatten(-1, (HEADS, OPTIONS["rank"]))
    p_BHLP = scores.transpose(1, 2).softmax(dim=2)
    near_keys = normalized(inputs.k_BHLK, mechanism.near_norm)
    far_keys = normalized(p_BHLP.mT @ inputs.k_BHLK, mechanism.far_norm)
    logits = inputs.q_BHLK @ torch.cat([near_keys, far_keys], dim=2).mT / math.sqrt(DIM)
    near, far = logits.softmax(dim=-1).split([40, OPTIONS["rank"]], dim=-1)
    found = map_of(mechanism, inputs, causal=False)
    torch.testing.assert_close(found, (near + far @ p_BHLP.mT).detach())


@pytest.mark.parametrize("causal", [False, True])
def test_heads_in_turn_are_heads_together(
    causal: bool, make_inputs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism = make()
    results = []
    for numbers in (long_short._CPU_NUMBERS, 1):
        monkeypatch.setattr(long_short, "_CPU_NUMBERS", numbers)
        inputs = make_inputs(100).differentiable()
        out = inputs.run(mechanism, causal=causal)
        leaves = [*inputs[:4], *mechanism.parameters()]
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_the_length_only(causal: bool, largest_tensor: Any) -> None:
    options = {"window": 32, "rank": 4, "chunk": 32, "memory": 128, "dual_norm": True}
    sizes = {"num_heads": HEADS, "head_dim": DIM, "model_dim": 16}
    largest = []
    for length in (1000, 2000):
        mechanism = create("long_short", options, **sizes, max_length=length)
        q, k, v = (torch.randn(1, HEADS, length, DIM, requires_grad=True) for _ in range(3))
        hidden_BLD = torch.randn(1, length, 16, requires_grad=True)
        mask_BL = torch.arange(length)[None] < length - 7
        largest_tensor.numel = 0
        with largest_tensor:
            out = mechanism(q, k, v, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal)
            out.square().sum().backward()
        largest.append(largest_tensor.numel)
    assert largest[1] <= 2.1 * largest[0]
    assert largest[1] < 2000**2 / 10


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, {"near_norm.weight", "near_norm.bias", "far_norm.weight", "far_norm.bias"}),
        ({"rank": 0}, {"near_norm.weight", "near_norm.bias"}),
        ({"dual_norm": False}, set()),
    ],
)
def test_it_has_the_parameters_that_it_uses(options: dict[str, Any], names: set[str]) -> None:
    found = {name: tuple(x.shape) for name, x in make(**options).named_parameters()}
    projection = {} if options.get("rank") == 0 else {"projection": (16, HEADS * 3)}
    assert found == dict.fromkeys(names, (HEADS * DIM,)) | projection


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [("window", 0, 1), ("rank", -1, 0), ("chunk", 0, 1), ("memory", 0, 1)],
)
def test_impossible_settings_are_refused(option: str, value: int, least: int) -> None:
    message = rf"attention\.{option}={value} must be at least {least}; type attention\.{option}="
    with pytest.raises(UserError, match=message):
        make(**{option: value})
