"""Random feature attention: its kernels, its unit vectors and scales, its gate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from protlm.attention import create
from protlm.model.positions import Rotary, rotate

HEADS, DIM, MODEL_DIM = 2, 8, 16


def rfa(*, seed: int = 1, **options: Any) -> Any:
    """The mechanism, small, in float64."""
    torch.manual_seed(seed)
    sizes = {"num_heads": HEADS, "head_dim": DIM, "model_dim": MODEL_DIM, "max_length": 64}
    return create("rfa", {"num_features": 20, **options}, **sizes, seed=seed).double()


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
    made = create("rfa", {}, num_heads=2, head_dim=5, model_dim=10, max_length=64)
    x_BHLK = torch.randn(1, 2, 3, 5)
    rest: Any = {"hidden_BLD": x_BHLK[:, 0], "mask_BL": torch.ones(1, 3, dtype=torch.bool)}
    out = made(*[x_BHLK] * 3, **rest, causal=False)
    assert out.shape == x_BHLK.shape


@pytest.mark.parametrize("gate", [False, True])
def test_a_zero_vector_has_finite_gradients(gate: bool, make_inputs: Callable[..., Any]) -> None:
    inputs = make_inputs(5).without_padding().to(torch.float32)
    for x in inputs[:2]:
        x[:, :, 2] = 0
        x[:, :, 3] = 1e-30
    inputs = inputs.differentiable()
    out = inputs.run(rfa(gate=gate).float(), causal=True)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sin().sum(), inputs[:3]))


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
