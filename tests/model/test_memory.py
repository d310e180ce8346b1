"""The memory of a forward pass: what is counted, and extrapolation to longer proteins."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import protlm
from protlm.attention import names
from protlm.model import memory
from protlm.model.memory import Room, TensorMemory, _peak, extrapolate
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import ProteinLM, build_network
from tests.marks import slow_but
from tests.small_models import small_model


def _never(seed: int) -> ProteinLM:
    raise AssertionError(seed)


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


@pytest.mark.parametrize("mechanism", slow_but(names(), "hybrid", "longformer", "reformer"))
def test_long_proteins_are_extrapolated(mechanism: str) -> None:
    found = small_model(mechanism, max_length=4098)
    # So wide that the features of a tile are not most of the memory.
    config = replace(found.description.model, num_heads=4, model_dim=128, feedforward_dim=344)
    network = build_network(config, {"name": mechanism}, seed=0)
    model = PretrainedModel(network, replace(found.description, model=config), rebuild=_never)
    estimated = Room(model).needs(4096)
    # Lengths are not multiples of the sizes of blocks.
    assert estimated == pytest.approx(_peak(model, 4096), rel=0.15)


def test_two_lengths_give_a_line_and_three_a_parabola() -> None:
    assert extrapolate({1024: 1030, 2048: 2054}, 35_000) == 35_006
    assert extrapolate({n: 3 * n**2 + n for n in (512, 1024, 2048)}, 8000) == 192_008_000


def test_a_square_of_the_length_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("softmax")
    monkeypatch.setattr(memory, "_peak", lambda _, length, training: 7 * length**2 + 100 * length)
    assert [Room(model).needs(length) for length in (10, 5000)] == [1700, 175_500_000]


def test_models_with_few_positions_are_measured(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    settings = ("model.positions=learned", "model.max_length=128", "trainer.max_steps=2")
    model = protlm.load(train_tiny(tmp_path / "run", *settings))
    assert model.max_residues is not None
    found = Room(model).needs(model.max_residues)
    assert found == pytest.approx(_peak(model, model.max_residues), rel=0.05)
