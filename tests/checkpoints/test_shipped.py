"""The models that come with protlm: found by name, and used where no model is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import protlm
from protlm.checkpoints import format as checkpoints
from protlm.checkpoints.format import CARD, default_model, find_model, shipped_models
from protlm.commands.checkpoint import export
from protlm.commands.models import announced_default
from protlm.system.errors import InputDataError, UserError


@pytest.fixture
def models(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped models: `second`, then `first`, and one without a card."""
    folder = tmp_path / "models"
    for name in ("second", "first", "unfinished"):
        export(tiny_run, folder / name)
        if name != "unfinished":
            (folder / name / CARD).write_text(f"# {name}\n")
    monkeypatch.setattr(checkpoints, "models_dir", lambda: folder)
    monkeypatch.setattr(checkpoints, "DEFAULT", "second")
    return folder


def test_models_are_found_by_name(models: Path) -> None:
    assert shipped_models() == [models / "first", models / "second"]
    assert find_model(Path("second")) == models / "second"
    assert find_model(Path("unfinished")) == Path("unfinished")
    assert protlm.load("first").hash == protlm.load(models / "second").hash


def test_a_folder_of_the_same_name_comes_first(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    assert find_model(Path("first")) == Path("first")
    with pytest.raises(InputDataError, match="first is not a model"):
        protlm.load("first")


def test_the_default_is_announced(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert announced_default("-m MODEL") == models / "second"
    assert capsys.readouterr().err == (
        "model: second, shipped with protlm; -m MODEL uses another\n"
    )


def test_without_models_the_user_has_to_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "models_dir", lambda: tmp_path)
    with pytest.raises(InputDataError, match=f"{checkpoints.DEFAULT} is not installed with protlm"):
        default_model()
    with pytest.raises(InputDataError, match=r"no such model.*protlm models"):
        protlm.load("first")


def test_a_damaged_shipped_model_is_refused(models: Path) -> None:
    weights = models / "first" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(InputDataError, match="is damaged"):
        protlm.load("first")


def test_an_export_in_bfloat16_is_half_as_large_and_rounded_once(
    tiny_run: Path, tmp_path: Path, train_tiny: Callable[..., Path]
) -> None:
    run = train_tiny(tmp_path / "run", "attention=performer_softmax", "model.qk_norm=true")
    export(run, tmp_path / "whole")
    export(run, tmp_path / "half", "bfloat16")
    export(tmp_path / "half", tmp_path / "again", "bfloat16")
    whole, half, again = (
        checkpoints.read(tmp_path / name).weights for name in ("whole", "half", "again")
    )
    parameters = {name for name, _ in protlm.load(run).network.named_parameters()}
    assert parameters < set(whole)
    for name, value in whole.items():
        assert half[name].dtype == (torch.bfloat16 if name in parameters else value.dtype)
        assert torch.equal(half[name], value.to(half[name].dtype))
        assert torch.equal(again[name], half[name])
    loaded = protlm.load(tmp_path / "half").network.state_dict()
    assert all(torch.equal(loaded[name], half[name].to(loaded[name].dtype)) for name in loaded)


def test_another_dtype_is_refused(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--dtype int8 is not one of float32, bfloat16"):
        export(tiny_run, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()
