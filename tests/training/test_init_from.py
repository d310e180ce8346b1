"""model.init_from: training starts with the weights of another model, and resumes with its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import protlm
from protlm.build import describe, load_initial_weights
from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import Checkpoint, export
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.model.transformer import build_network
from protlm.system.errors import InputDataError, UserError
from tests.interop.families import ESM


def initialized(
    described: ModelDescription, path: Path, attention: str | None = None, **model: Any
) -> dict[str, torch.Tensor]:
    """The weights of a new network, with other settings if given, that starts from a model."""
    config = replace(described.model, **model)
    options = described.attention_config if attention is None else {"name": attention}
    network = build_network(config, options, seed=7)
    load_initial_weights(network, config, options, path)
    return network.state_dict()


@pytest.fixture
def esm(tmp_path: Path) -> Path:
    """An ESM-2 with the frequencies of the formula."""
    return ESM.save(tmp_path / "esm", {n: v for n, v in ESM.tensors().items() if "inv_" not in n})


@pytest.mark.parametrize("foreign", [True, False])
def test_the_weights_are_those_of_the_model(foreign: bool, tiny_run: Path, esm: Path) -> None:
    """Settings of training and of the use of memory may differ, and those without effect."""
    path = esm if foreign else tiny_run
    model = protlm.load(path)
    others: dict[str, Any] = {"dropout": 0.1, "feedforward_chunk": 8}
    others |= {"max_length": 64, "norm_epsilon": None} if foreign else {}
    found = initialized(model.description, path, **others)
    expected = model.network.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_init_from_is_not_part_of_the_architecture(tiny_run: Path) -> None:
    asked = compose(TrainConfig, ["model=tiny", "run_dir=run", f"model.init_from={tiny_run}"])
    assert "init_from" not in describe(asked).to_plain()["model"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_dim": 32}, r"another architecture .*model_dim="),
        ({"model_dim": 32}, r"type: attention=performer_relu model\.model_dim=64$"),
        ({}, r"type attention=performer_relu, or .* checkpoint convert .* --attention softmax "),
    ],
)
def test_the_architecture_and_the_attention_that_fit_are_named(
    changes: dict[str, Any], message: str, tiny_run: Path
) -> None:
    with pytest.raises(UserError, match=message):
        initialized(protlm.load(tiny_run).description, tiny_run, "softmax", **changes)


@pytest.mark.parametrize(
    "setting, value, message",
    [
        ("activation", "relu", "model.activation=gelu, .* this run is relu"),
        ("token_dropout", False, "model.token_dropout=true, .* this run is false"),
        ("norm_epsilon", 1e-3, "model.norm_epsilon=1e-05, .* this run is 0.001"),
        ("norm_order", "post", "model.norm_order=pre, .* this run is post"),
        ("positions", "sinusoidal", "model.positions=rotary, .* this run is sinusoidal"),
    ],
)
def test_a_setting_without_weights_is_compared(
    setting: str, value: Any, message: str, esm: Path
) -> None:
    described = protlm.load(esm).description
    value = type(getattr(described.model, setting))(value)
    with pytest.raises(UserError, match=rf"init_from=.*\({message}\); type: model.{setting}="):
        initialized(described, esm, **{setting: value})


@pytest.mark.parametrize(
    "stored, message",
    [
        ("redraw_every=null", r"\(attention.redraw_every=null, .* is 1000\); type: attention.red"),
        ("backend=torch", None),
    ],
)
def test_options_of_the_same_attention_are_compared(
    stored: str, message: str | None, tmp_path: Path
) -> None:
    asked = ["model=tiny", "run_dir=run", "attention=performer_softmax", "attention.num_features=8"]
    other, own = (compose(TrainConfig, given) for given in ([*asked, f"attention.{stored}"], asked))
    weights = build_network(other.model, other.attention, seed=0).state_dict()
    export(Checkpoint(tmp_path, describe(other), weights), tmp_path / "model")
    if message is None:
        initialized(describe(own), tmp_path / "model")
    else:
        with pytest.raises(UserError, match=message):
            initialized(describe(own), tmp_path / "model")


def test_a_missing_model_is_named(tiny_run: Path) -> None:
    with pytest.raises(InputDataError, match="nothing"):
        initialized(protlm.load(tiny_run).description, tiny_run / "nothing")


def test_a_run_starts_from_the_weights_and_resumes_without_them(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    def history(run: Path) -> list[list[str]]:
        return [row.split("\t") for row in (run / "history.tsv").read_text().splitlines()]

    first = train_tiny(tmp_path / "first", "trainer.max_steps=2")
    asked = [f"model.init_from={first}", "schedule.warmup_steps=0", "seed=5"]
    second = train_tiny(tmp_path / "second", *asked, "trainer.max_steps=2")
    assert history(second)[1][3] == history(first)[-1][3]
    # The run no longer needs the initial model.
    first.rename(tmp_path / "elsewhere")
    train_tiny(second, *asked, "trainer.max_steps=4")
    assert history(second)[-2][1:3] == ["start", "2"]
