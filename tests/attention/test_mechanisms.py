"""What single mechanisms promise beyond the contract: extremes, initial values, sharing, hashes."""

import math
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from protlm.attention import create
from protlm.attention.nystromformer import convolved, pseudo_inverse
from protlm.attention.reformer import most_chunks
from protlm.model.positions import Rotary, rotate
from tests.attention.cases import HAS_FAR_KEYS, MODES, Inputs, make_inputs
from tests.rounding import condition_of, error_bound

SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16}


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    sizes = {"num_heads": q.shape[1], "head_dim": q.shape[3], "model_dim": 16, "max_length": 300}
    return Inputs.whole(q, k, v).run(create(name, {}, **sizes).to(q.dtype), causal=causal)


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_padded_key_has_no_weight_beside_large_logits(dtype, causal):
    softmax = create("softmax", {}, num_heads=1, head_dim=8, model_dim=8, max_length=2)
    q_BHLK = torch.full((1, 1, 2, 8), 100.0, dtype=dtype)
    v_BHLC = torch.tensor([1.0, 2.0], dtype=dtype)[:, None].expand(1, 1, 2, 8)
    inputs = Inputs(q_BHLK, -q_BHLK, v_BHLC, q_BHLK[:, 0], torch.tensor([[False, True]]))
    assert inputs.run(softmax, causal=causal)[0, 0, :, 0].tolist() == [0, 2]


@MODES
@pytest.mark.parametrize("shift", [-30.0, 1e3])
def test_small_and_large_keys_of_linear_attention_keep_their_digits(shift, causal):
    # elu(-30) + 1 is 0 in float32, exp(-30) is not; and exp(1000) would be infinite.
    q, k, v, *_ = make_inputs(70).without_padding()
    k = k.float().double() + shift
    expected = attend("linear", q, k, v, causal=causal)
    found = attend("linear", q.float(), k.float(), v.float(), causal=causal)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@MODES
def test_without_any_weight_outputs_are_0_and_gradients_finite(causal):
    inputs = make_inputs(70).without_padding().to(torch.float32)
    # exp(-200) is 0 in float32: no key before the last has weight.
    inputs.k_BHLK[:, :, :-1] -= 200
    inputs = inputs.differentiable()
    out = attend("linear", *inputs[:3], causal=causal)
    last = inputs.v_BHLC[:, :, -1:]
    torch.testing.assert_close(out[:, :, -1:], last)
    others = torch.zeros_like(out) if causal else last.expand_as(out)
    torch.testing.assert_close(out[:, :, :-1], others[:, :, :-1])
    found = torch.autograd.grad(out.sin().sum(), inputs[:3])
    assert all(gradient.isfinite().all() for gradient in found)


@HAS_FAR_KEYS
@MODES
def test_large_queries_and_keys_of_hedgehog_choose_one_key(causal):
    # exp(500) overflows; the output is that of the key with the largest product of features. Where
    # causal, both large keys are cut at the same height.
    x_BHLK = torch.tensor([1.0, 499.0, 500.0]).reshape(1, 1, 3, 1)
    v_BHLC = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1)
    out = attend("hedgehog", x_BHLK, x_BHLK, v_BHLC, causal=causal)
    last = (2 + 3 * math.e) / (1 + math.e)
    expected = torch.tensor([1.0, 2.0, 2.5] if causal else [last] * 3)
    torch.testing.assert_close(out[0, 0, :, 0], expected, rtol=1e-5, atol=1e-5)


LENGTH = 40


def linformer(sharing: str, *, projected_length: int = 10, max_length: int = LENGTH) -> Any:
    options = {"projected_length": projected_length, "sharing": sharing}
    return create("linformer", options, **SIZES, max_length=max_length).double()


# A mechanism, its options and length, its parameters that are drawn, and their standard deviation.
@pytest.mark.parametrize(
    ("name", "options", "max_length", "parameter", "deviation"),
    [
        ("linformer", {"projected_length": 100, "sharing": "heads"}, 4000, "key_projection", 0.1),
        ("linformer", {"projected_length": 100, "sharing": "heads"}, 4000, "value_projection", 0.1),
        ("aft_full", {"rank": 64}, 2000, "biases.u", 0.01),
        ("aft_full", {"rank": 64}, 2000, "biases.v", 0.01),
        # Like the kernels of torch: uniform up to the root of its width.
        ("nystromformer", {"conv_kernel": 9999}, 1, "conv_weight", (3 * 9999) ** -0.5),
        ("rfa", {"gate": True}, 64, "gate.weight", 0.02),
    ],
)
def test_parameters_start_from_their_distribution(name, options, max_length, parameter, deviation):
    """Within four standard errors, and not from the same draws as another parameter."""
    torch.manual_seed(0)
    parameters = dict(create(name, options, **SIZES, max_length=max_length).named_parameters())
    drawn = parameters.pop(parameter).detach().flatten()
    number = drawn.numel()
    assert abs(drawn.mean()) < 4 * deviation / number**0.5
    assert abs(drawn.square().mean() / deviation**2 - 1) < 4 * (2 / number) ** 0.5
    for other in parameters.values():
        if other.numel() == number and other.detach().std() > 0:
            pair = torch.stack([drawn, other.detach().flatten()])
            assert abs(torch.corrcoef(pair)[0, 1]) < 4 / number**0.5
    assert name != "nystromformer" or 0.99 < drawn.abs().max() * 9999**0.5 <= 1


def sharing_layers() -> Any:
    """Creates three layers; the second and the third use the parameters of the first."""
    made = [linformer("layers") for _ in range(3)]
    for later in made[1:]:
        later.share_with(made[0])
    return nn.ModuleList(made)


def test_layers_that_share_have_their_parameter_once_and_learn_alike():
    layers = sharing_layers()
    assert list(layers.state_dict()) == ["0.key_projection"]
    assert [name for name, _ in layers.named_parameters()] == ["0.key_projection"]
    # safetensors refuses tensors that share their memory.
    assert len(save(layers.state_dict())) < 1.1 * 8 * 10 * LENGTH
    fresh = sharing_layers()
    fresh.load_state_dict(layers.state_dict(), assign=True)
    inputs = make_inputs(LENGTH)
    outputs = [inputs.run(layer, causal=False) for layer in (*layers, *fresh)]
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    outputs[0].sum().backward()
    once = layers[0].key_projection.grad.clone()
    (outputs[1].sum() + outputs[2].sum()).backward()
    torch.testing.assert_close(layers[0].key_projection.grad, 3 * once)


def test_the_iteration_is_of_order_three():
    """With R = 1 - A Z its polynomial is R ← ¾ R³ + ¼ R⁴."""
    a = torch.randn(3, 2, 12, 12, dtype=torch.float64).softmax(-1)
    one = torch.eye(12, dtype=torch.float64)
    for number in range(8):
        residual = one - a @ pseudo_inverse(a, number)
        cube = residual @ residual @ residual
        expected = 3 / 4 * cube + 1 / 4 * cube @ residual
        after = one - a @ pseudo_inverse(a, number + 1)
        torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-9)


def test_an_inverse_near_its_limit_keeps_the_precision_of_float32():
    """Near the inverse, errors are amplified; in float32 they would be 2e-5."""
    generator = torch.Generator().manual_seed(0)
    # Alike within 32 positions, so that the landmarks are not means of noise.
    shape = (3, 1, 4, 512 // 32, 64)
    alike = 2 * torch.randn(shape, generator=generator).repeat_interleave(32, dim=3)
    q, k, v = alike + torch.randn(alike.shape, generator=generator)
    options = {"num_iterations": 12, "conv_kernel": None}
    ours = create("nystromformer", options, num_heads=4, head_dim=64, model_dim=256, max_length=1)

    def output(*heads: torch.Tensor) -> list[torch.Tensor]:
        return [Inputs.whole(*heads).run(ours, causal=False)]

    operands = [x.double() for x in (q, k, v)]
    (exact,), (condition,) = output(*operands), condition_of(output, operands)
    # 1.4e-5: logits are sums over 64 coordinates.
    bound = error_bound(torch.float32, condition, math.sqrt(64))
    assert (output(q, k, v)[0] - exact).norm() <= bound * exact.norm()


@pytest.mark.parametrize("width", [33, 35, 65])
def test_a_wide_kernel_has_its_gradient_in_float32(width):
    """The gradient of torch's own convolution misses it by 5 % and more on some CPUs."""
    v = torch.randn(1, 8, 512, 64)
    weight = torch.randn(8, width)
    cotangent = torch.randn_like(v)
    found, exact = (
        torch.autograd.grad(convolved(v.to(dtype), leaf), leaf, cotangent.to(dtype))[0]
        for dtype in (torch.float32, torch.float64)
        for leaf in [weight.to(dtype).requires_grad_()]
    )
    assert (found - exact).norm() <= 1e-5 * exact.norm()


def test_float16_does_not_overflow_in_reformer():
    inputs = make_inputs(130).without_padding()
    inputs = inputs._replace(q_BHLK=30 * inputs.q_BHLK).to(torch.float16)
    made = create("reformer", {"chunk": 8}, **SIZES, max_length=256)
    out, expected = (x.run(made, causal=True) for x in (inputs, inputs.to(torch.float64)))
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("max_length", "chunk", "num_buckets"),
    [(64, 64, 1), (65, 64, 2), (512, 64, 8), (1024, 64, 16), (1000, 64, 14), (3, 1, 2)],
)
def test_each_chunk_of_the_longest_input_has_about_one_bucket(max_length, chunk, num_buckets):
    made: Any = create("reformer", {"chunk": chunk}, **SIZES, max_length=max_length)
    assert made.num_buckets == num_buckets
    assert made.rotations.shape == (4, 2, 8, (num_buckets + 1) // 2)


def rfa(**options: Any) -> Any:
    torch.manual_seed(1)
    return create("rfa", {"num_features": 20, **options}, **SIZES, max_length=64, seed=1).double()


def test_scaled_distances_of_rotated_vectors_depend_on_the_distance_of_positions():
    """With one scale for each coordinate they would depend on absolute positions."""
    mechanism, rotary = rfa(), Rotary(head_dim=8)
    q_BHLK, k_BHLK = torch.randn(2, 1, 2, 1, 8, dtype=torch.float64)
    mask_BL = torch.ones(1, 1, dtype=torch.bool)
    mechanism.scales.data.uniform_(0.5, 2)
    distances = []
    for shift in (0, 1, 50):
        q, k = (
            mechanism._scaled(rotate(x, *rotary.angles(torch.tensor([p]))), mask_BL)
            for x, p in ((q_BHLK, 3 + shift), (k_BHLK, 7 + shift))
        )
        distances.append((q - k).norm(dim=-1))
    for distance in distances[1:]:
        torch.testing.assert_close(distance, distances[0], rtol=1e-6, atol=0)


def test_an_odd_width_has_a_scale_for_its_last_coordinate():
    made = create("rfa", {}, num_heads=2, head_dim=5, model_dim=10, max_length=64)
    x_BHLK = torch.randn(1, 2, 3, 5)
    assert Inputs.whole(*[x_BHLK] * 3).run(made, causal=False).shape == x_BHLK.shape


@pytest.mark.parametrize("scale", [10.0, 1e4])
def test_extreme_gates_keep_digits_and_finite_gradients(scale):
    mechanism = rfa(gate=True, kernel="arccos", denominator_floor=None)
    mechanism.gate.weight.data.normal_()
    inputs = make_inputs(300)
    inputs = inputs._replace(hidden_BLD=scale * inputs.hidden_BLD).to(torch.float32)
    exact = inputs.to(torch.float64).run(mechanism, causal=True)
    leaves = inputs.differentiable()
    out = leaves.run(mechanism.float(), causal=True)
    assert (out - exact).norm() <= 1e-5 * exact.norm()
    found = torch.autograd.grad(out.sin().sum(), [*leaves[:4], *mechanism.parameters()])
    assert all(gradient.isfinite().all() for gradient in found)


def test_gates_start_with_memories_from_8_to_512_positions():
    gate = rfa(gate=True).gate
    assert (1 / torch.sigmoid(-gate.bias)).tolist() == pytest.approx([8, 512], rel=1e-4)


@pytest.mark.parametrize(("number", "num_buckets", "size"), [(50, 5, 8), (3, 9, 4), (64, 1, 8)])
def test_no_buckets_need_more_than_the_most_chunks(number, num_buckets, size):
    """The worst: one in each bucket, and all others in the first."""
    worst = torch.arange(number).where(torch.arange(number) < num_buckets, 0)
    chunks = -(-worst.bincount() // size)
    assert chunks.sum() == most_chunks(number, num_buckets=num_buckets, size=size)
