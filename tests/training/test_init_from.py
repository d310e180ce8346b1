"""model.init_from: training starts with the weights of another model, and resumes with its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import protlm
from protlm.build import describe, load_initial_weights
from protlm.checkpoints.format import Checkpoint, export
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.model.transformer import build_network
from protlm.system.errors import InputDataError, UserError


def config(*overrides: str) -> TrainConfig:
    return compose(TrainConfig, ["model=tiny", "run_dir=run", *overrides])


def test_the_weights_are_those_of_the_model(tiny_run: Path) -> None:
    model = protlm.load(tiny_run)
    described = model.description
    network = build_network(described.model, described.attention_config, seed=7)
    load_initial_weights(network, described.model, described.attention_config, tiny_run)
    expected = model.network.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in network.state_dict().items())


def test_init_from_is_not_part_of_the_architecture(tiny_run: Path) -> None:
    asked = config(f"model.init_from={tiny_run}")
    assert "init_from" not in describe(asked).to_plain()["model"]


def test_another_architecture_is_refused(tiny_run: Path) -> None:
    model = config("model.model_dim=32").model
    network = build_network(model, {"name": "softmax"}, seed=0)
    with pytest.raises(UserError, match=r"another architecture .*model_dim="):
        load_initial_weights(network, model, {"name": "softmax"}, tiny_run)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            ["attention.redraw_every=null", "attention.num_features=8"],
            r"\(attention.redraw_every=null, .* is 1000\); type: attention.redraw_every=null$",
        ),
        (["attention.num_features=8", "attention.backend=torch"], None),
    ],
)
def test_options_of_the_same_attention_are_compared(
    typed: list[str],
    message: str | None,
    tmp_path: Path,
) -> None:
    performer = config("attention=performer_softmax", *typed)
    built = build_network(performer.model, performer.attention, seed=0)
    export(Checkpoint(tmp_path, describe(performer), built.state_dict()), tmp_path / "model")
    asked = config("attention=performer_softmax", "attention.num_features=8")
    network = build_network(asked.model, asked.attention, seed=1)
    given = (network, asked.model, asked.attention, tmp_path / "model")
    if message is None:
        load_initial_weights(*given)
    else:
        with pytest.raises(UserError, match=message):
            load_initial_weights(*given)


@pytest.mark.parametrize(
    ("dim", "message"),
    [
        (32, r"type: attention=performer_relu model\.model_dim=64$"),
        (64, r"type attention=performer_relu, or .* checkpoint convert .* --attention softmax "),
    ],
)
def test_the_attention_that_fits_is_named(dim: int, message: str, tiny_run: Path) -> None:
    found = protlm.load(tiny_run).description
    model = replace(found.model, model_dim=dim)
    network = build_network(model, {"name": "softmax"}, seed=0)
    with pytest.raises(UserError, match=message):
        load_initial_weights(network, model, {"name": "softmax"}, tiny_run)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    model = config().model
    network = build_network(model, {"name": "softmax"}, seed=0)
    with pytest.raises(InputDataError, match="nothing"):
        load_initial_weights(network, model, {"name": "softmax"}, tmp_path / "nothing")


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
