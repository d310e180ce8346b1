"""Random feature attention: its kernels, its unit vectors and scales, its gate."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from protlm.attention import create
from protlm.attention.base import RandomFeatures
from protlm.model.positions import Rotary, rotate
from protlm.system.errors import UserError

HEADS, DIM, MODEL_DIM = 2, 8, 16


def rfa(*, seed: int = 1, **options: Any) -> Any:
    """The mechanism, small, in float64."""
    torch.manual_seed(seed)
    sizes = {"num_heads": HEADS, "head_dim": DIM, "model_dim": MODEL_DIM, "max_length": 64}
    return create("rfa", {"num_features": 20, **options}, **sizes, seed=seed).double()


def randomize(mechanism: Any) -> Any:
    """Moves parameters away from their initial values; some gates still have long memories."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return mechanism


def set_gates(mechanism: Any, gates_L: Tensor) -> Tensor:
    """Sets the gates of all heads to `gates_L` by the hidden input that it returns."""
    with torch.no_grad():
        mechanism.gate.weight.zero_()[:, 0] = 1
        mechanism.gate.bias.zero_()
    hidden_BLD = torch.zeros(3, len(gates_L), MODEL_DIM, dtype=torch.float64)
    hidden_BLD[..., 0] = gates_L.logit()
    return hidden_BLD


def square(x: Tensor) -> Tensor:
    """|x|²."""
    return x.square().sum(dim=-1)


def map_of(mechanism: Any, inputs: Any, *, causal: bool = True) -> Tensor:
    """The mechanism's map."""
    rest = {"hidden_BLD": inputs.hidden_BLD, "mask_BL": inputs.mask_BL}
    return mechanism.attention_map(inputs.q_BHLK, inputs.k_BHLK, **rest, causal=causal)


def gaussian(x_BHLK: Tensor, y_BHMK: Tensor) -> Tensor:
    """exp(-|x - y|²/2) of every pair."""
    return (-square(x_BHLK[:, :, :, None] - y_BHMK[:, :, None]) / 2).exp()


def arc_cosine(x_BHLK: Tensor, y_BHMK: Tensor) -> Tensor:
    """|x||y| (sin θ + (π - θ) cos θ) / 2π of every pair."""
    x, y = x_BHLK[:, :, :, None], y_BHMK[:, :, None]
    cosine = F.cosine_similarity(x, y, dim=-1)
    angle = cosine.acos()
    norms = (square(x) * square(y)).sqrt()
    return norms * (angle.sin() + (math.pi - angle) * cosine) / (2 * math.pi)


KERNELS = {"gaussian": gaussian, "arccos": arc_cosine}


@pytest.mark.parametrize("kernel", KERNELS)
def test_estimates_are_unbiased(kernel: str, make_inputs: Callable[..., Any]) -> None:
    mechanism = rfa(kernel=kernel, num_features=500)
    inputs = make_inputs(3).without_padding()
    x, y = (0.5 * vectors[:1] for vectors in inputs[:2])
    draws = []
    for index in range(200):
        mechanism.performer.redraw(index)
        draws.append(mechanism.performer.kernel(x, y))
    estimates = torch.stack(draws)
    standard_error = estimates.std(dim=0) / math.sqrt(len(draws))
    z_scores = (estimates.mean(dim=0) - KERNELS[kernel](x, y)) / standard_error
    assert z_scores.abs().max() < 4


def test_scaled_distances_of_rotated_vectors_depend_on_the_distance_of_positions() -> None:
    """With one scale for each coordinate they would depend on absolute positions."""
    mechanism, rotary = rfa(), Rotary(head_dim=DIM)
    q_BHLK, k_BHLK = torch.randn(2, 1, HEADS, 1, DIM, dtype=torch.float64)
    mask_BL = torch.ones(1, 1, dtype=torch.bool)
    with torch.no_grad():
        mechanism.scales.uniform_(0.5, 2)
    distances = []
    for shift in (0, 1, 50):
        q, k = (
            mechanism._scaled(rotate(x, *rotary.angles(p, p + 1)), mask_BL)
            for x, p in ((q_BHLK, 3 + shift), (k_BHLK, 7 + shift))
        )
        distances.append((q - k).norm(dim=-1))
    torch.testing.assert_close(distances[1], distances[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(distances[2], distances[0], rtol=1e-6, atol=0)


def test_an_odd_width_has_a_scale_for_its_last_coordinate() -> None:
    sizes = {"num_heads": 2, "head_dim": 5, "model_dim": 10, "max_length": 64}
    x_BHLK = torch.randn(1, 2, 3, 5)
    mask_BL = torch.ones(1, 3, dtype=torch.bool)
    made = create("rfa", {}, **sizes)
    out = made(*[x_BHLK] * 3, hidden_BLD=x_BHLK[:, 0], mask_BL=mask_BL, causal=False)
    assert out.shape == x_BHLK.shape


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_with_many_features_the_map_is_that_of_the_kernel_of_scaled_unit_vectors(
    kernel: str, make_inputs: Callable[..., Any]
) -> None:
    mechanism = rfa(kernel=kernel, num_features=800_000)
    inputs = make_inputs(5).without_padding()
    generator = torch.Generator().manual_seed(2)
    pairs = 0.5 + torch.rand(HEADS, DIM // 2, generator=generator, dtype=torch.float64)
    scales_HK = torch.cat([pairs, pairs], dim=-1)
    with torch.no_grad():
        mechanism.scales.copy_(pairs.flatten())
    unit = [x / (x.norm(dim=-1, keepdim=True) + 1e-3) for x in inputs[:2]]
    weights = KERNELS[kernel](*(x * scales_HK[:, None] for x in unit))
    expected = weights / weights.sum(dim=-1, keepdim=True)
    # Standard errors of some half a percent of a weight, the largest of 150.
    torch.testing.assert_close(map_of(mechanism, inputs, causal=False), expected, rtol=0, atol=3e-3)


def test_with_many_features_it_is_softmax_of_unit_vectors(make_inputs: Callable[..., Any]) -> None:
    mechanism = rfa(num_features=20_000)
    inputs = make_inputs(5).without_padding()
    # Long vectors, so that the 10⁻³ is negligible.
    inputs = inputs._replace(q_BHLK=1e6 * inputs.q_BHLK, k_BHLK=1e6 * inputs.k_BHLK)
    q, k = (F.normalize(x, dim=-1) for x in inputs[:2])
    for causal in (False, True):
        expected = F.scaled_dot_product_attention(q, k, inputs.v_BHLC, is_causal=causal, scale=1.0)
        found = inputs.run(mechanism, causal=causal)
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-2)


@pytest.mark.parametrize("gate", [False, True])
def test_lengths_of_queries_and_keys_do_not_matter(
    gate: bool, make_inputs: Callable[..., Any]
) -> None:
    mechanism = randomize(rfa(gate=gate))
    inputs = make_inputs(70)
    out, longer = (
        inputs._replace(q_BHLK=a * inputs.q_BHLK, k_BHLK=b * inputs.k_BHLK).run(
            mechanism, causal=True
        )
        for a, b in ((1e5, 1e5), (3e5, 7e6))
    )
    torch.testing.assert_close(out, longer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gate", [False, True])
def test_a_zero_vector_has_finite_gradients(gate: bool, make_inputs: Callable[..., Any]) -> None:
    inputs = make_inputs(5).without_padding().to(torch.float32)
    for x in inputs[:2]:
        x[:, :, 2] = 0
        x[:, :, 3] = 1e-30
    inputs = inputs.differentiable()
    out = inputs.run(rfa(gate=gate).float(), causal=True)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sin().sum(), inputs[:3]))


GRADIENT_OPTIONS = {
    "gaussian": {},
    "arccos": {"kernel": "arccos"},
    # Few features, so that some sums are at the floor; and many, so that a tile is 64 positions.
    "gate": {"gate": True, "num_features": 3},
    "gate over tiles": {"gate": True, "num_features": 1100},
}


@pytest.mark.parametrize("options", GRADIENT_OPTIONS.values(), ids=GRADIENT_OPTIONS)
@pytest.mark.parametrize("length", [3, 270])
def test_gradients_away_from_the_initial_parameters(
    options: dict[str, Any], length: int, make_inputs: Callable[..., Any]
) -> None:
    mechanism = randomize(rfa(**options))
    inputs = make_inputs(length).with_padding(0.0).differentiable()
    parameters = dict(mechanism.named_parameters())
    leaves = [*inputs[:4], *parameters.values()]
    generator = torch.Generator().manual_seed(5)

    def total(moved: list[Tensor]) -> Tensor:
        named = dict(zip(parameters, moved[4:], strict=True))
        rest = {"hidden_BLD": moved[3], "mask_BL": inputs.mask_BL, "causal": True}
        return torch.func.functional_call(mechanism, named, tuple(moved[:3]), rest).sin().sum()

    found = torch.autograd.grad(total(leaves), leaves, materialize_grads=True)
    # Each input separately, in a random direction, so that others do not hide a small gradient.
    for number, (leaf, gradient) in enumerate(zip(leaves, found, strict=True)):
        direction = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        step = 1e-6 * direction
        above, below = (
            total([*leaves[:number], leaf.detach() + sign * step, *leaves[number + 1 :]])
            for sign in (1, -1)
        )
        expected = (above - below) / 2e-6
        torch.testing.assert_close((gradient * direction).sum(), expected, rtol=1e-5, atol=1e-6)


def test_a_sum_of_weights_below_the_floor_is_the_floor(make_inputs: Callable[..., Any]) -> None:
    # With one row, most sums are far from those of the kernel, and many are negative.
    floor = 0.3
    mechanism = rfa(num_features=1, denominator_floor=floor, gate=False)
    with torch.no_grad():
        mechanism.scales.fill_(2.0)
    inputs = make_inputs(40).without_padding()
    (row_1K,) = (x for name, x in mechanism.named_buffers() if name.endswith("projection"))
    angles = [2 * (x / (x.norm(dim=-1, keepdim=True) + 1e-3)) @ row_1K.mT for x in inputs[:2]]
    weights = (angles[0] - angles[1].mT).cos().tril()
    sums = weights.sum(dim=-1, keepdim=True)
    assert (sums < floor).any() and (sums > floor).any()
    torch.testing.assert_close(map_of(mechanism, inputs), weights / sums.clamp(min=floor))


def test_the_floor_of_arc_cosines_is_in_units_of_the_kernel(
    make_inputs: Callable[..., Any],
) -> None:
    inputs = make_inputs(1).without_padding()
    # The kernel of a vector with itself is 1/2 for any number of features.
    inputs = inputs._replace(k_BHLK=inputs.q_BHLK)
    for floor, expected in ((0.1, 1.0), (5.0, 0.1)):
        mechanism = rfa(kernel="arccos", num_features=100_000, denominator_floor=floor)
        weight = map_of(mechanism, inputs).flatten()
        torch.testing.assert_close(weight, torch.full_like(weight, expected), rtol=0.03, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gate_that_counts_is_a_plain_mean(kernel: str, make_inputs: Callable[..., Any]) -> None:
    # Many features, so that no sum is near the floor, which the gated form applies to the mean.
    options = {"kernel": kernel, "num_features": 3000, "denominator_floor": 1e-3}
    gated, plain = rfa(gate=True, **options), rfa(**options)
    inputs = make_inputs(130).without_padding()
    steps_L = torch.arange(1, 131, dtype=torch.float64)
    inputs = inputs._replace(hidden_BLD=set_gates(gated, (steps_L - 1).clamp(min=1e-9) / steps_L))
    found, expected = (inputs.run(mechanism, causal=True) for mechanism in (gated, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gate", [0.3, 0.98])
def test_a_constant_gate_is_an_exponential_decay(
    gate: float, make_inputs: Callable[..., Any]
) -> None:
    length = 150
    mechanism = rfa(gate=True)
    inputs = make_inputs(length).without_padding()
    same_BHLK = inputs.q_BHLK[:, :, :1].expand_as(inputs.q_BHLK)
    inputs = inputs._replace(
        q_BHLK=same_BHLK,
        k_BHLK=same_BHLK,
        hidden_BLD=set_gates(mechanism, torch.full((length,), gate, dtype=torch.float64)),
    )
    age_LL = torch.arange(length)[:, None] - torch.arange(length)
    weights_LL = ((1 - gate) * gate ** age_LL.double().clamp(min=0)).tril()
    expected_LL = weights_LL / weights_LL.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(map_of(mechanism, inputs), expected_LL.expand(3, 2, -1, -1))


def test_a_closed_gate_forgets_all_and_an_open_one_writes_nothing(
    make_inputs: Callable[..., Any],
) -> None:
    mechanism = rfa(gate=True)
    gates_L = torch.full((100,), 0.9, dtype=torch.float64)
    gates_L[70], gates_L[80] = 0.0, 1.0
    inputs = make_inputs(100).without_padding()
    inputs = inputs._replace(hidden_BLD=set_gates(mechanism, gates_L))
    weights = map_of(mechanism, inputs)
    assert weights[:, :, 70:, :70].abs().max() < 1e-4
    assert weights[:, :, 70:, 70].abs().min() > 1e-5
    assert weights[:, :, 80:, 80].abs().max() < 1e-4


def test_tiles_of_a_long_sequence_join(make_inputs: Callable[..., Any]) -> None:
    # With 1,100 features a tile is 64 positions.
    mechanism = randomize(rfa(gate=True, num_features=1100))
    inputs = make_inputs(200).without_padding()
    state = mechanism.initial_state(inputs.k_BHLK[:, :, 0], inputs.v_BHLC[:, :, 0])
    outs = []
    for position in range(200):
        at = (x[:, :, position] for x in inputs[:3])
        state, out_BHC = mechanism.step(state, *at, hidden_BD=inputs.hidden_BLD[:, position])
        outs.append(out_BHC)
    torch.testing.assert_close(torch.stack(outs, dim=2), inputs.run(mechanism, causal=True))


def test_padding_neither_decays_nor_writes(make_inputs: Callable[..., Any]) -> None:
    mechanism = randomize(rfa(gate=True))
    inputs = make_inputs(200)
    out = inputs.run(mechanism, causal=True)
    for sample in range(3):
        real_L = inputs.mask_BL[sample]
        dense = [x[sample : sample + 1, ..., real_L, :] for x in inputs[:4]]
        dense = type(inputs)(*dense, inputs.mask_BL[sample : sample + 1, real_L])
        expected = dense.run(mechanism, causal=True)[0]
        torch.testing.assert_close(out[sample, :, real_L], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("position", [1, 64, 100, 600])
def test_the_past_does_not_see_gates_of_the_future(
    position: int, make_inputs: Callable[..., Any]
) -> None:
    mechanism = randomize(rfa(gate=True)).float()
    inputs = make_inputs(650).to(torch.float32)
    hidden_BLD = inputs.hidden_BLD.clone()
    hidden_BLD[:, position:] *= -30
    before = inputs.run(mechanism, causal=True)
    after = inputs._replace(hidden_BLD=hidden_BLD).run(mechanism, causal=True)
    assert torch.equal(before[:, :, :position], after[:, :, :position])
    assert not torch.equal(before, after)


@pytest.mark.parametrize("scale", [10.0, 1e4])
def test_extreme_gates_keep_digits_and_finite_gradients(
    scale: float, make_inputs: Callable[..., Any]
) -> None:
    mechanism = rfa(gate=True, kernel="arccos", denominator_floor=None)
    with torch.no_grad():
        mechanism.gate.weight.normal_()
    inputs = make_inputs(300)
    inputs = inputs._replace(hidden_BLD=scale * inputs.hidden_BLD).to(torch.float32)
    exact = inputs.to(torch.float64).run(mechanism, causal=True)
    leaves = inputs.differentiable()
    out = leaves.run(mechanism.float(), causal=True)
    assert (out - exact).norm() <= 1e-5 * exact.norm()
    found = torch.autograd.grad(out.sin().sum(), [*leaves[:4], *mechanism.parameters()])
    assert all(gradient.isfinite().all() for gradient in found)


def test_gates_start_with_memories_from_8_to_512_positions() -> None:
    gate = rfa(gate=True).gate
    assert (1 / torch.sigmoid(-gate.bias)).tolist() == pytest.approx([8, 512], rel=1e-4)
    assert gate.weight.std().item() == pytest.approx(0.02, rel=0.5)


def test_a_redraw_is_a_pure_function_of_seed_and_index() -> None:
    one, other = rfa(), rfa()
    features = [module for module in one.modules() if isinstance(module, RandomFeatures)]
    assert [module.redraw_every for module in features] == [1000]
    first = one.performer.projection.clone()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    one.performer.redraw(3)
    assert torch.equal(torch.rand(1), expected)
    for index in (5, 3):
        other.performer.redraw(index)
    assert torch.equal(one.performer.projection, other.performer.projection)
    assert not torch.equal(one.performer.projection, first)
    assert not torch.equal(rfa(seed=2).performer.projection, first)


@pytest.mark.parametrize("gate", [False, True])
def test_memory_grows_with_the_length_only(gate: bool, largest_tensor: Any) -> None:
    sizes = []
    for length in (4096, 8192):
        q, k, v = (torch.randn(1, HEADS, length, DIM, requires_grad=True) for _ in range(3))
        hidden_BLD = torch.randn(1, length, MODEL_DIM, requires_grad=True)
        mask_BL = torch.arange(length)[None] < length - 7
        largest_tensor.numel = 0
        with largest_tensor:
            out = rfa(gate=gate).float()(
                q, k, v, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=True
            )
            out.square().sum().backward()
        sizes.append(largest_tensor.numel)
    # A tile has 2¹⁸ numbers for each thread; its decays are 64 for each position.
    tile = (1 << 18) * torch.get_num_threads()
    assert sizes[1] <= max(2 * sizes[0], tile)
    assert sizes[1] <= max(tile, HEADS * 8192 * MODEL_DIM)


def test_activation_checkpointing_and_autocast_change_no_bit(
    make_inputs: Callable[..., Any],
) -> None:
    mechanism = rfa(gate=True).float()
    results = []
    for is_special in (False, True):
        inputs = make_inputs(70).to(torch.float32).differentiable()

        def output(*tensors: Tensor, inputs: Any = inputs) -> Tensor:
            return type(inputs)(*tensors, inputs.mask_BL).run(mechanism, causal=True)

        with torch.autocast("cpu", torch.bfloat16, enabled=is_special):
            run = partial(checkpoint, output, use_reentrant=False) if is_special else output
            out = run(*inputs[:4])
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs[:4])])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no kernel": (
        {"kernel": "cosine"},
        "kernel=cosine does not exist; there are: arccos, gaussian",
    ),
    "no guard": ({"denominator_floor": None}, "denominator_floor=null allows division"),
    "zero floor": ({"denominator_floor": 0.0}, "denominator_floor=0.0 must be a number above 0"),
    "infinite": ({"denominator_floor": math.inf}, "denominator_floor=inf must be a number above"),
    "no features": ({"num_features": 0}, "num_features=0 must be at least 1"),
    "no steps": ({"redraw_every": 0}, "redraw_every=0 must be at least 1"),
    "no switch": ({"gate": "yes"}, "gate=yes must be true or false"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_a_bad_setting_is_rejected_with_a_suggestion(name: str) -> None:
    options, message = BAD_SETTINGS[name]
    with pytest.raises(UserError, match=re.escape(message)) as error:
        rfa(**options)
    assert str(error.value).startswith("attention.")


def test_the_gate_is_causal_only() -> None:
    assert not rfa(gate=True).supports_bidirectional
    assert rfa().supports_bidirectional
    assert rfa(gate=True).supports_causal
