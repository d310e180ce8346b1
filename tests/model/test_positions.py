"""Rotary positions against their formula (arXiv 2104.09864, equation 34), written pair by pair."""

import math

import pytest
import torch
from torch import Tensor

from protlm.model.positions import Rotary, rotate


def by_pairs(x_BHLK: Tensor, start: int) -> Tensor:
    """Each pair (i, i + K/2) as a complex number, times exp(i·position·frequency)."""
    half = x_BHLK.shape[-1] // 2
    frequency = torch.tensor([10_000.0 ** (-i / half) for i in range(half)], dtype=torch.float64)
    position = torch.arange(start, start + x_BHLK.shape[2], dtype=torch.float64)
    turn = torch.polar(
        torch.ones(len(position), half, dtype=torch.float64), position[:, None] * frequency
    )
    turned = torch.complex(x_BHLK[..., :half], x_BHLK[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("start", [0, 35_000])
def test_rotation_and_its_gradient_are_those_of_the_formula(start: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # The layout of the model: heads come out of one product, so that positions are not adjacent.
    x_BLHK = torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=generator)
    weights = torch.randn(2, 3, 5, 8, dtype=torch.float64, generator=generator)
    angles = Rotary(head_dim=8).angles(start, start + 5)
    results = []
    for turn in (lambda x: rotate(x, *angles), lambda x: by_pairs(x, start)):
        leaf = x_BLHK.clone().requires_grad_()
        out = turn(leaf.transpose(1, 2))
        (gradient,) = torch.autograd.grad((out * weights).sum(), leaf)
        results.append((out, gradient))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_rotation_in_pieces_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    x_BHLK = torch.randn(2, 3, 11, 8, generator=torch.Generator().manual_seed(0))
    angles = Rotary(head_dim=8).angles(7, 18)
    expected_BHLK = rotate(x_BHLK, *angles)
    # 4 positions of 48 numbers at a time, and 3 at the end; or less than one.
    for numbers in (200, 1):
        monkeypatch.setattr("protlm.model.positions._PIECE", numbers)
        assert torch.equal(rotate(x_BHLK, *angles), expected_BHLK)


def test_an_empty_batch_is_rotated() -> None:
    x_BHLK = torch.zeros(0, 3, 11, 8)
    assert rotate(x_BHLK, *Rotary(head_dim=8).angles(0, 11)).shape == x_BHLK.shape


def test_low_precision_is_kept_and_rounded_once() -> None:
    x_BHLK = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    angles = Rotary(head_dim=8).angles(100, 109)
    low_BHLK = x_BHLK.bfloat16()
    turned = rotate(low_BHLK, *angles)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(low_BHLK.float(), *angles).bfloat16())
    norms = turned.float().norm(dim=-1) / low_BHLK.float().norm(dim=-1)
    assert math.isclose(norms.mean().item(), 1.0, rel_tol=1e-2)


def test_stored_frequencies_are_those_of_the_file() -> None:
    """Angles are those of frequencies that were rounded in training."""
    assert Rotary(head_dim=8).state_dict() == {}
    rotary = Rotary(head_dim=8, stored=True)
    rounded = rotary.frequency.half().float()
    assert not torch.equal(rounded.double(), rotary.frequency)
    rotary.load_state_dict({"frequency": rounded})
    cos_LK, sin_LK = rotary.angles(5, 7)
    angle = torch.tensor([5.0, 6.0], dtype=torch.float64)[:, None] * rounded.double()
    assert torch.equal(cos_LK, angle.cos().repeat(1, 2).float())
    assert torch.equal(sin_LK, angle.sin().repeat(1, 2).float())
