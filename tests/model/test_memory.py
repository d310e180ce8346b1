"""The memory of a forward pass: what is counted, and extrapolation to longer proteins."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import protlm
from protlm.model.memory import TensorMemory, _peak, forward_bytes


def test_the_peak_is_that_of_the_tensors_in_use() -> None:
    x = torch.ones(1000)
    with TensorMemory() as memory:
        a = x + 1
        b = a * 2
        del a
        # A view has no memory of its own.
        c = b.view(10, 100).T
        d = c + 1
        del b, c, d
        x += 1
    assert memory.peak == 2 * 4000


@pytest.mark.parametrize("attention", ["performer_relu", "softmax"])
def test_long_proteins_are_extrapolated(
    attention: str, train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    settings = (f"attention={attention}", "model.positions=rotary", "trainer.max_steps=2")
    model = protlm.load(train_tiny(tmp_path / "run", *settings))
    (found,) = forward_bytes(model, [1500])
    # Short sequences are not computed in the same blocks.
    assert found == pytest.approx(_peak(model, 1500), rel=0.15)


def test_models_with_few_positions_are_measured(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    settings = ("model.positions=learned", "model.max_length=128", "trainer.max_steps=2")
    model = protlm.load(train_tiny(tmp_path / "run", *settings))
    assert model.max_residues is not None
    (found,) = forward_bytes(model, [model.max_residues])
    assert found == pytest.approx(_peak(model, model.max_residues), rel=0.05)
