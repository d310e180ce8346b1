"""Redrawing the projection, and the settings around it."""

from typing import Any

import pytest
import torch

from protlm.attention import create
from protlm.attention.base import RandomFeatures
from protlm.system.errors import UserError


def performer(name: str = "performer_softmax", *, seed: int = 1, **options: Any) -> Any:
    """A small Performer."""
    sizes = {"num_heads": 2, "head_dim": 8, "model_dim": 16, "max_length": 64}
    return create(name, {"num_features": 20, **options}, **sizes, seed=seed)


@pytest.mark.parametrize("name", ["performer_softmax", "performer_relu"])
def test_a_redraw_is_a_pure_function_of_seed_and_index_in_place(name: str) -> None:
    one, other = performer(name), performer(name)
    assert issubclass(type(one), RandomFeatures)
    first, storage = one.projection.clone(), one.projection.data_ptr()
    one.redraw(3)
    assert not torch.equal(one.projection, first)
    for index in (5, 3):
        other.redraw(index)
    assert torch.equal(one.projection, other.projection)
    assert one.projection.data_ptr() == storage
    assert one.redraw_index == 3
    one.redraw(0)
    assert torch.equal(one.projection, first)


def test_seeds_differ() -> None:
    assert not torch.equal(performer(seed=1).projection, performer(seed=2).projection)


def test_the_projection_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    performer().redraw(4)
    assert torch.equal(torch.rand(1), expected)


def test_a_state_dict_keeps_the_draw() -> None:
    one, other = performer(seed=1), performer(seed=2)
    one.redraw(9)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.projection, other.projection)
    assert other.redraw_index == 9
    assert other.projection.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("performer_softmax", {"num_features": 0}, "num_features=0 must be at least 1"),
        ("performer_softmax", {"num_features": None}, "num_features"),
        ("performer_softmax", {"num_features": "many"}, "num_features"),
        ("performer_softmax", {"redraw_every": 0}, "redraw_every=0 must be at least 1"),
        ("performer_relu", {"kernel_epsilon": -1e-3}, "kernel_epsilon=-0.001 must be 0 or more"),
        (
            "performer_relu",
            {"num_features": None, "redraw_every": 5},
            "redraw_every=5 needs a projection",
        ),
    ],
)
def test_impossible_settings_are_explained(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        performer(name, **options)
