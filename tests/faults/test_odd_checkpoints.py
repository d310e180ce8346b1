"""Checkpoints with a correct SHA-256 and invalid contents are bad input, in one sentence."""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import protlm
from protlm.build import load_initial_weights
from protlm.checkpoints import format as checkpoints
from protlm.checkpoints.checks import write_sum, write_sums
from protlm.interop import hugging_face
from protlm.model.transformer import build_network
from protlm.system.errors import InputDataError

HUGE = 10**12


@pytest.fixture
def newest(tiny_run: Path, tmp_path: Path) -> Path:
    """The newest checkpoint of a copy of a run."""
    run = shutil.copytree(tiny_run, tmp_path / "run")
    found = checkpoints.latest(run)
    assert found is not None
    return found


@pytest.fixture
def exported(tiny_run: Path, tmp_path: Path) -> Path:
    checkpoints.export(checkpoints.read(tiny_run), tmp_path / "exported")
    return tmp_path / "exported"


def assert_refused(path: Path) -> str:
    """Loads a model that must be refused; returns the sentence."""
    with pytest.raises(InputDataError) as caught:
        protlm.load(path)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SHAPES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a list": lambda contents: [contents],
    "a number": lambda contents: 3,
    "no weights": lambda contents: contents | {"state_dict": None},
    "weights in a list": lambda contents: contents | {"state_dict": [torch.ones(2)]},
    "weights that are strings": lambda contents: contents | {"state_dict": {"network.a": "b"}},
    "weights without names": lambda contents: contents | {"state_dict": {3: torch.ones(2)}},
    "no weights of a network": lambda contents: contents | {"state_dict": {"a": torch.ones(2)}},
    "an average that is a list": lambda contents: contents | {"average": [1]},
    "sparse weights": lambda contents: (
        contents | {"state_dict": {"network.head.bias": torch.ones(33).to_sparse()}}
    ),
    "no description": lambda contents: contents | {"protlm": None},
    "an empty description": lambda contents: contents | {"protlm": {"format": 1}},
}


@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES)
def test_another_shape(change: Callable[[dict[str, Any]], object], newest: Path) -> None:
    torch.save(change(checkpoints.load_training(newest)), newest)
    write_sum(newest, contents=newest)
    assert_refused(newest)


@pytest.mark.parametrize("key", ["loops", "optimizer_states", "state_dict"])
def test_a_run_does_not_continue_without_a_part(
    key: str, newest: Path, train_tiny: Callable[..., Path]
) -> None:
    contents = checkpoints.load_training(newest)
    del contents[key]
    checkpoints.save_training(contents, newest)
    with pytest.raises(InputDataError, match=f"its '{key}' is missing"):
        train_tiny(newest.parents[1], "trainer.max_steps=6")


DESCRIPTIONS: dict[str, tuple[str, object]] = {
    "no model": ("model", None),
    "a list for the model": ("model", [1]),
    "no attention": ("attention", None),
    "attention without a name": ("attention", {}),
    "another objective": ("objective", "both"),
    "an objective that is a list": ("objective", []),
    "a string for the seed": ("seed", "0"),
    "a negative seed": ("seed", -1),
    "a huge seed": ("seed", 2**70),
    "a string for the length": ("max_length", "128"),
    "a vocabulary that is a number": ("vocabulary", 3),
    "strings for numbers": ("model.num_heads", "4"),
    "a switch for a number": ("model.num_layers", True),
    "a list for a number": ("model.model_dim", [64]),
    "no width": ("model.model_dim", 0),
    "NaN for a number": ("model.dropout", float("nan")),
    "no such choice": ("model.positions", "random"),
    "an unknown setting": ("model.color", "red"),
    "an environment variable": ("model.norm", "${oc.env:TOKEN}"),
    "a huge number of layers": ("model.num_layers", HUGE),
    "a huge width": ("model.model_dim", HUGE),
    "a huge feed-forward": ("model.feedforward_dim", HUGE),
    "a huge table": ("model.max_length", HUGE),
    "a huge number of heads": ("model.num_heads", HUGE),
    "huge features": ("attention.num_features", HUGE),
    "a string for features": ("attention.num_features", "many"),
    "an attention that is a list": ("attention.name", ["softmax"]),
}


@pytest.mark.parametrize(("key", "value"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_another_description(
    key: str, value: object, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "layer")
    config = exported / "config.json"
    description = json.loads(config.read_text())
    group, _, name = key.partition(".")
    if key == "model.max_length":
        description["model"]["positions"] = "sinusoidal"
    if name:
        description[group][name] = value
    else:
        description[key] = value
    config.write_text(json.dumps(description))
    write_sums(exported)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sentence = assert_refused(exported)
    assert "${oc.env:TOKEN}" in sentence or value != "${oc.env:TOKEN}"
    # In KiB: the tiny model itself takes some hundred.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


@pytest.mark.parametrize(
    "value", [torch.nan, torch.inf, torch.int64, torch.bool, torch.complex64, torch.int8]
)
def test_weights_that_are_not_numbers(
    value: float | torch.dtype, newest: Path, tmp_path: Path
) -> None:
    """In every form of a model, and as the beginning of a run."""
    contents, found = checkpoints.load_training(newest), checkpoints.read(newest)
    bias = found.weights["head.bias"]
    bias = bias.to(value) if isinstance(value, torch.dtype) else bias.fill_(value)
    contents["state_dict"]["network.head.bias"] = found.weights["head.bias"] = bias
    checkpoints.save_training(contents, newest)
    checkpoints.export(found, tmp_path / "exported")
    hugging_face.export(found, tmp_path / "for_transformers", None)
    described = found.description
    network = build_network(described.model, described.attention_config, seed=0)
    for path in (newest, tmp_path / "exported", tmp_path / "for_transformers"):
        message = assert_refused(path)
        assert f"as {value}" in message or "NaN or infinite" in message
        assert "head.bias'" in message
        with pytest.raises(InputDataError, match=r"head\.bias'"):
            load_initial_weights(network, described.model, described.attention_config, path)


def test_a_checkpoint_that_is_a_folder(newest: Path) -> None:
    newest.unlink()
    newest.mkdir()
    assert "is not a model" in assert_refused(newest)
    with pytest.raises(InputDataError, match="is missing or not a file"):
        checkpoints.load_training(newest)


def test_a_name_that_is_impossible_for_a_file() -> None:
    with pytest.raises(InputDataError, match="File name too long"):
        protlm.load(Path("x" * 300))
