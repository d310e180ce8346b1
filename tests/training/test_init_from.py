"""model.init_from: training starts with the weights of another model, and resumes with its own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import protlm
from protlm.build import build_network, describe, load_initial_weights
from protlm.composition import compose
from protlm.config import TrainConfig
from protlm.errors import InputDataError, UserError


def config(*overrides: str) -> TrainConfig:
    return compose(TrainConfig, ["model=tiny", "run_dir=run", *overrides])


def test_the_weights_are_those_of_the_model(tiny_run: Path) -> None:
    model = protlm.load(tiny_run)
    described = model.description
    network = build_network(described.model, described.attention_config, seed=7)
    load_initial_weights(network, described.model, tiny_run)
    expected = model.network.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in network.state_dict().items())


def test_init_from_is_not_part_of_the_architecture(tiny_run: Path) -> None:
    asked = config(f"model.init_from={tiny_run}")
    assert "init_from" not in describe(asked).to_plain()["model"]


def test_another_architecture_is_refused(tiny_run: Path) -> None:
    model = config("model.model_dim=32").model
    network = build_network(model, {"name": "softmax"}, seed=0)
    with pytest.raises(UserError, match=r"another architecture .*model_dim="):
        load_initial_weights(network, model, tiny_run)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    model = config().model
    network = build_network(model, {"name": "softmax"}, seed=0)
    with pytest.raises(InputDataError, match="nothing"):
        load_initial_weights(network, model, tmp_path / "nothing")


def test_a_run_starts_from_the_weights_and_resumes_without_them(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    first = train_tiny(tmp_path / "first", "trainer.max_steps=2")
    asked = [f"model.init_from={first}", "schedule.warmup_steps=0"]
    second = train_tiny(tmp_path / "second", *asked, "trainer.max_steps=2", "seed=5")
    history = (second / "history.tsv").read_text().splitlines()
    saved = (first / "history.tsv").read_text().splitlines()[-1].split("\t")
    assert history[1].split("\t")[3] == saved[3]
    # The run no longer needs the initial model.
    first.rename(tmp_path / "elsewhere")
    train_tiny(second, *asked, "trainer.max_steps=4", "seed=5")
    start = [row.split("\t") for row in (second / "history.tsv").read_text().splitlines()][-2]
    assert start[1:3] == ["start", "2"]
