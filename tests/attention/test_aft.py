"""The attention-free transformers with biases of any size, their limits, and where sums vanish."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protlm.attention import Attention, create
from protlm.system.errors import UserError
from tests.rounding import error_bound

SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16, "max_length": 300}
OPTIONS: dict[str, dict[str, Any]] = {
    "aft_full": {"rank": 6},
    "aft_local": {"window": 40, "rank": 6},
    "aft_simple": {},
    "aft_conv": {"kernel_size": 5},
}
MODES = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def with_large_biases(name: str, scale: float = 1.5, **changes: Any) -> Attention:
    """A mechanism whose biases are far from 0, in float64."""
    options = {key: changes.pop(key, value) for key, value in OPTIONS[name].items()}
    mechanism = create(name, options, **{**SIZES, **changes}).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in mechanism.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = scale * drawn
    return mechanism


def run(mechanism: Attention, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """The output without padding."""
    mask_BL = torch.ones(len(q), q.shape[2], dtype=torch.bool)
    hidden_BLD = q.new_zeros(len(q), q.shape[2], 16)
    return mechanism(q, k, v, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal)


def whole_map(mechanism: Attention, q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """The map without padding."""
    mask_BL = torch.ones(len(q), q.shape[2], dtype=torch.bool)
    return mechanism.attention_map(q, k, hidden_BLD=q[:, 0], mask_BL=mask_BL, causal=causal)


def draw(length: int, *, heads: int = 2, width: int = 8, seed: int = 0) -> tuple[Tensor, ...]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 2, heads, length, width)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64))


def biases(mechanism: Attention, name: str, length: int, *, causal: bool) -> Tensor:
    """w by the definitions, HLL or 1LL, one pair at a time where it is a convolution's."""
    tables = dict(mechanism.named_parameters())
    if name == "aft_simple":
        return torch.zeros(1, length, length, dtype=torch.float64)
    if name == "aft_conv":
        return convolution_biases(tables, length, causal=causal)
    bias_LL = tables["biases.u"][:length] @ tables["biases.v"][:length].T
    if name == "aft_local":
        position_L = torch.arange(length)
        is_far = (position_L[:, None] - position_L).abs() >= OPTIONS[name]["window"]
        bias_LL = bias_LL.masked_fill(is_far, 0)
    return bias_LL[None]


def convolution_biases(tables: dict[str, nn.Parameter], length: int, *, causal: bool) -> Tensor:
    """w[o] of output i and input j = i + o - reach to the left, as conv1d has it."""
    kernel = tables["kernel"]
    size = kernel.shape[1]
    kernel = (kernel - kernel.mean(1, keepdim=True)) / kernel.std(1, keepdim=True, correction=0)
    kernel = tables["gain"][:, None] * kernel + tables["shift"][:, None]
    left = size - 1 if causal else size // 2
    bias_HLL = torch.zeros(len(kernel), length, length, dtype=torch.float64)
    for i in range(length):
        for place in range(size):
            j = i + place - left
            if 0 <= j < length:
                bias_HLL[:, i, j] = kernel[:, place]
    return bias_HLL


def dense_weights(name: str, k: Tensor, bias_HLL: Tensor, *, causal: bool) -> Tensor:
    """The weights of every pair and channel, (B, H, L, L, K)."""
    if name == "aft_conv":
        k = (k.sum(-1, keepdim=True) / math.sqrt(k.shape[-1])).expand_as(k)
    logits = k[:, :, None] + bias_HLL[..., None]
    if causal:
        length = k.shape[2]
        is_later = torch.ones(length, length, dtype=torch.bool).triu(1)
        logits = logits.masked_fill(is_later[..., None], -torch.inf)
    return logits.softmax(dim=3)


def dense(
    mechanism: Attention, name: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool
) -> Tensor:
    """Computes the output by the definition, with one weight for every pair and channel."""
    bias_HLL = biases(mechanism, name, q.shape[2], causal=causal)
    weights = dense_weights(name, k, bias_HLL, causal=causal)
    return q.sigmoid() * torch.einsum("bhijk,bhjk->bhik", weights, v)


@MODES
@pytest.mark.parametrize("length", [1, 31, 129, 300])
@pytest.mark.parametrize("name", OPTIONS)
def test_large_biases_weigh_as_defined(name: str, length: int, causal: bool) -> None:
    """At the start biases are small or 0: the contract sees them only in gradients."""
    mechanism = with_large_biases(name)
    inputs = tuple(x.requires_grad_() for x in draw(length))
    leaves = [*inputs, *mechanism.parameters()]
    results = []
    outs = (
        run(mechanism, *inputs, causal=causal),
        dense(mechanism, name, *inputs, causal=causal),
    )
    for out in outs:
        gradients = torch.autograd.grad(out, leaves, torch.cos(out.detach()), allow_unused=True)
        results.append([out, *(torch.zeros(()) if g is None else g for g in gradients)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@MODES
@pytest.mark.parametrize("name", OPTIONS)
def test_the_map_is_the_mean_over_the_channels(name: str, causal: bool) -> None:
    mechanism = with_large_biases(name)
    q, k, v = draw(70)
    weights = dense_weights(name, k, biases(mechanism, name, 70, causal=causal), causal=causal)
    found = whole_map(mechanism, q, k, causal=causal)
    torch.testing.assert_close(found, weights.mean(-1).detach())
    if name == "aft_conv":
        # All channels of a head have the same weights.
        torch.testing.assert_close(
            q.sigmoid() * (found @ v), run(mechanism, q, k, v, causal=causal)
        )


@MODES
@pytest.mark.parametrize("window", [130, 1000])
def test_a_window_over_everything_is_aft_full(window: int, causal: bool) -> None:
    full = with_large_biases("aft_full")
    local = with_large_biases("aft_local", window=window)
    inputs = draw(130)
    torch.testing.assert_close(
        run(local, *inputs, causal=causal), run(full, *inputs, causal=causal)
    )


@MODES
@pytest.mark.parametrize("name", ["aft_full", "aft_local"])
def test_without_biases_it_is_aft_simple(name: str, causal: bool) -> None:
    mechanism, simple = with_large_biases(name, scale=0.0), with_large_biases("aft_simple")
    inputs = draw(130)
    torch.testing.assert_close(
        run(mechanism, *inputs, causal=causal), run(simple, *inputs, causal=causal)
    )


@MODES
def test_a_convolution_begins_as_aft_simple_with_one_key_for_a_head(causal: bool) -> None:
    convolution = create("aft_conv", {"kernel_size": 7}, **SIZES).double()
    simple = with_large_biases("aft_simple")
    q, k, v = draw(130)
    one_key = (k.sum(-1, keepdim=True) / math.sqrt(8)).expand_as(k)
    torch.testing.assert_close(
        run(convolution, q, k, v, causal=causal), run(simple, q, one_key, v, causal=causal)
    )


@MODES
def test_a_convolution_is_aft_full_with_a_toeplitz_bias(causal: bool) -> None:
    length = 130
    convolution = with_large_biases("aft_conv", num_heads=1)
    full = with_large_biases("aft_full", rank=length, max_length=length)
    parameters = dict(full.named_parameters())
    parameters["biases.u"].data = biases(convolution, "aft_conv", length, causal=causal)[0].detach()
    parameters["biases.v"].data = torch.eye(length, dtype=torch.float64)
    q, k, v = draw(length, heads=1)
    one_key = (k.sum(-1, keepdim=True) / math.sqrt(8)).expand_as(k)
    torch.testing.assert_close(
        run(convolution, q, k, v, causal=causal), run(full, q, one_key, v, causal=causal)
    )


@MODES
@pytest.mark.parametrize("name", OPTIONS)
def test_a_constant_in_a_channel_of_the_keys_changes_nothing(name: str, causal: bool) -> None:
    mechanism = with_large_biases(name)
    q, k, v = draw(130)
    constants = 10 * torch.randn(2, 2, 1, 8, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(
        run(mechanism, q, k + constants, v, causal=causal), run(mechanism, q, k, v, causal=causal)
    )


@MODES
def test_a_constant_in_a_row_of_the_biases_changes_nothing(causal: bool) -> None:
    inputs = draw(300)
    mechanism = with_large_biases("aft_full")
    before = run(mechanism, *inputs, causal=causal)
    parameters = dict(mechanism.named_parameters())
    rows = torch.linspace(-40, 40, 300, dtype=torch.float64)[:, None]
    for name, column in (("biases.u", rows), ("biases.v", torch.ones_like(rows))):
        parameters[name].data = torch.cat([parameters[name].data, column], dim=1)
    torch.testing.assert_close(run(mechanism, *inputs, causal=causal), before)


@MODES
@pytest.mark.parametrize("name", OPTIONS)
def test_an_output_is_no_larger_than_the_values(name: str, causal: bool) -> None:
    mechanism = with_large_biases(name).float()
    q, k, v = (30 * x.float() for x in draw(300))
    out = run(mechanism, q, k, v, causal=causal)
    assert (out.abs().amax(2) <= v.abs().amax(2) * (1 + 1e-5)).all()


# Exponents that float32 represents exactly, so that errors come from the sums, not from rounding.
SLOPES = {
    "each e^3 times the one before": lambda j: 3.0 * j,
    "each e^3 times less": lambda j: -3.0 * j,
    "the last e^200 times the others": lambda j: 200.0 * (j == j[-1]),
    "every third e^100 times the others": lambda j: 100.0 * (j % 3 == 1),
}


@MODES
@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_far_larger_keys_make_no_other_sum_vanish(name: str, slope: str, causal: bool) -> None:
    """One reference for all positions would leave rows before a large key 0 / 0."""
    mechanism = with_large_biases(name)
    q, k, v = draw(300)
    # The exponent of a convolution is the sum over 8 channels by √8.
    key_L = SLOPES[slope](torch.arange(300)).double() / (math.sqrt(8) if name == "aft_conv" else 1)
    k = key_L[:, None].float().double().expand_as(k)
    expected = dense(mechanism, name, q, k, v, causal=causal)
    inputs = [x.float().requires_grad_() for x in (q, k, v)]
    out = run(mechanism.float(), *inputs, causal=causal)
    budget = 1e-5
    if name == "aft_conv":
        # The exponents are sums over 8 channels: their rounding is that of the weights.
        largest = float(SLOPES[slope](torch.arange(300)).abs().max())
        budget = error_bound(torch.float32, 1 + largest, math.sqrt(8))
    assert (out.double() - expected).norm() <= budget * expected.norm()
    assert (out.double() - expected).abs().amax() <= 10 * budget
    gradients = torch.autograd.grad(out.sum(), [*inputs, *mechanism.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


@MODES
@pytest.mark.parametrize("name", ["aft_full", "aft_local"])
def test_biases_of_keys_that_a_row_does_not_see_make_no_sum_vanish(name: str, causal: bool) -> None:
    """w_ij = 3j: in a row of the causal form later keys would have the largest weights by far."""
    mechanism = with_large_biases(name, rank=1)
    parameters = dict(mechanism.named_parameters())
    parameters["biases.u"].data = torch.ones(300, 1, dtype=torch.float64)
    parameters["biases.v"].data = 3 * torch.arange(300, dtype=torch.float64)[:, None]
    q, k, v = draw(300)
    expected = dense(mechanism, name, q, k, v, causal=causal)
    out = run(mechanism.float(), q.float(), k.float(), v.float(), causal=causal)
    assert (out.double() - expected).norm() <= 1e-5 * expected.norm()


@MODES
@pytest.mark.parametrize("bias", [-20.0, 20.0])
def test_very_negative_biases_cancel_nothing(bias: float, causal: bool) -> None:
    """Σ e^k + Σ (e^w - 1) e^k, the short formula, loses what e^w leaves of a large near key."""
    mechanism = create("aft_local", {"window": 20, "rank": 1}, **SIZES).double()
    for parameter in mechanism.parameters():
        parameter.data = torch.full_like(parameter, math.sqrt(abs(bias)))
    parameters = dict(mechanism.named_parameters())
    parameters["biases.u"].data *= math.copysign(1, bias)
    q, k, v = draw(100)
    k = k.clone()
    k[:, :, 50] += 20
    position_L = torch.arange(100)
    near = (position_L[:, None] - position_L).abs() < 20
    weights = dense_weights("aft_local", k, (bias * near)[None].double(), causal=causal)
    expected = q.sigmoid() * torch.einsum("bhijk,bhjk->bhik", weights, v)
    out = run(mechanism.float(), q.float(), k.float(), v.float(), causal=causal)
    assert (out.double() - expected).norm() <= 1e-5 * expected.norm()


@MODES
@pytest.mark.parametrize("largest", [-200.0, -88.0, -87.0, -86.0])
def test_a_row_whose_weights_all_vanish_is_zero(causal: bool, largest: float) -> None:
    """Compared with the bias 0 of distant pairs, e^-86 is 0 in float32, but never NaN."""
    mechanism = create("aft_local", {"window": 20, "rank": 1}, **SIZES)
    for parameter, value in zip(mechanism.parameters(), (20.0, largest / 20), strict=True):
        parameter.data = torch.full_like(parameter, value)
    inputs = [x.float().requires_grad_() for x in draw(10)]
    out = run(mechanism, *inputs, causal=causal)
    assert out.eq(0).all()
    gradients = torch.autograd.grad(out.sum(), [*inputs, *mechanism.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


@MODES
@pytest.mark.parametrize("name", ["aft_local", "aft_simple", "aft_conv"])
def test_heads_that_are_computed_apart_are_as_together(name: str, causal: bool) -> None:
    """Five heads of this length are cut into groups, the last one smaller."""
    length, width = 1100, 96
    sizes = {"num_heads": 5, "head_dim": width, "max_length": length}
    mechanism = with_large_biases(name, scale=0.3, **sizes)
    q, k, v = (x[:1] for x in draw(length, heads=5, width=width))
    out = run(mechanism, q, k, v, causal=causal)
    for head in range(5):
        alone = with_large_biases(name, scale=0.3, **sizes)
        if name == "aft_conv":
            for parameter in alone.parameters():
                parameter.data = parameter.data[head : head + 1]
        one = slice(head, head + 1)
        torch.testing.assert_close(
            run(alone, q[:, one], k[:, one], v[:, one], causal=causal), out[:, one]
        )


@MODES
@pytest.mark.parametrize("name", OPTIONS)
def test_memory_grows_with_the_length_only(name: str, causal: bool, largest_tensor: Any) -> None:
    width = 16
    sizes = {"num_heads": 2, "head_dim": width, "max_length": 4096}
    largest = []
    for length in (1024, 4096):
        mechanism = with_large_biases(name, **sizes).float()
        q, k, v = (x[:1].float().requires_grad_() for x in draw(length, width=width))
        with largest_tensor:
            run(mechanism, q, k, v, causal=causal).square().sum().backward()
        largest.append(largest_tensor.numel)
        largest_tensor.numel = 0
    assert largest[1] <= 4 * largest[0]


@MODES
@pytest.mark.parametrize("name", ["aft_full", "aft_local", "aft_simple", "aft_conv"])
def test_no_step_on_the_way_is_kept(name: str, causal: bool) -> None:
    """Between forward and backward only inputs, outputs and tables are stored."""
    length, width = 2048, 32
    sizes = {"num_heads": 2, "head_dim": width, "max_length": length}
    mechanism = with_large_biases(name, **sizes).float()
    q, k, v = (x[:1].float().requires_grad_() for x in draw(length, width=width))
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.itemsize
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        run(mechanism, q, k, v, causal=causal)
    tables = 10 * length * 40 if name in ("aft_full", "aft_local") else 0
    assert sum(kept.values()) <= 4 * q.numel() + tables, sorted(kept.values())


@pytest.mark.parametrize("name", ["aft_full", "aft_local"])
def test_more_positions_than_tables_are_refused(name: str) -> None:
    mechanism = with_large_biases(name, max_length=9)
    q, k, v = draw(10)
    for refused in (
        lambda: run(mechanism, q, k, v, causal=False),
        lambda: whole_map(mechanism, q, k, causal=False),
    ):
        with pytest.raises(UserError, match="10 positions exceed the 9"):
            refused()
    assert run(mechanism, q[:, :, :9], k[:, :, :9], v[:, :, :9], causal=False).isfinite().all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("aft_full", {"rank": 0}, "attention.rank=0 must be at least 1"),
        ("aft_local", {"rank": -2}, "attention.rank=-2 must be at least 1"),
        ("aft_local", {"window": 0}, "attention.window=0 must be at least 1.*aft_simple"),
        ("aft_conv", {"kernel_size": 1}, "attention.kernel_size=1 must be odd and at least 3"),
        ("aft_conv", {"kernel_size": 8}, "attention.kernel_size=8 must be odd and at least 3"),
    ],
)
def test_impossible_settings_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        create(name, OPTIONS[name] | options, **SIZES)


def test_tables_begin_small() -> None:
    """u and v have the standard deviation 0.01."""
    mechanism = create("aft_full", {"rank": 64}, **{**SIZES, "max_length": 2000})
    for parameter in mechanism.parameters():
        assert parameter.shape == (2000, 64)
        assert abs(float(parameter.detach().std()) - 0.01) < 2e-4


@MODES
def test_padding_does_not_change_the_output_of_a_sequence(
    causal: bool, make_inputs: Callable[..., Any]
) -> None:
    """Tables are read by the index in the tensor: padding at the end changes nothing."""
    mechanism = with_large_biases("aft_local")
    inputs = make_inputs(290)
    alone = type(inputs)(*(x[1:2, ..., :145, :] for x in inputs[:4]), inputs.mask_BL[1:2, :145])
    torch.testing.assert_close(
        alone.run(mechanism, causal=causal), inputs.run(mechanism, causal=causal)[1:2, :, :145]
    )
