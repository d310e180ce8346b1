"""No pickle, and no name in a config or a checkpoint, executes code outside protlm."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import protlm
from protlm import evaluation
from protlm.checkpoints import format as checkpoints
from protlm.checkpoints.checks import write_sum, write_sums
from protlm.commands.checkpoint import info, verify
from protlm.commands.evaluate import evaluate
from protlm.commands.train import train
from protlm.config import EvaluateConfig, TrainConfig
from protlm.config.composition import compose
from protlm.system.errors import UserError
from tests.marks import slow_but

Train = Callable[..., Path]

# What a config must not be able to name, and what it would do.
NAMES = (
    "os.system",
    "logging.os.system",
    "builtins.eval",
    "torch.hub.load",
    "pathlib.Path.unlink",
    "protlm.attention.softmax.os",
    "../../canary",
    "canary",
)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that exists only if foreign code has run."""
    return tmp_path / "canary"


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_run, tmp_path / "run")


@pytest.fixture
def exported(tiny_run: Path, tmp_path: Path) -> Path:
    checkpoints.export(checkpoints.read(tiny_run), tmp_path / "exported")
    return tmp_path / "exported"


class Malicious:
    """An object whose unpickling creates the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.canary}",)


PICKLES: dict[str, Callable[[Malicious, Path], object]] = {
    "a bare pickle": lambda bad, path: path.write_bytes(pickle.dumps(bad)),
    "a bare pickle of an old protocol": lambda bad, path: path.write_bytes(pickle.dumps(bad, 0)),
    "torch's archive": lambda bad, path: torch.save({"state_dict": bad}, path),
    "torch's old format": lambda bad, path: torch.save(
        {"protlm": bad}, path, _use_new_zipfile_serialization=False
    ),
    "beside what is good": lambda bad, path: torch.save(
        torch.load(path, weights_only=True) | {"callbacks": {"Monitor": bad}}, path
    ),
}


@pytest.mark.parametrize("spoil", PICKLES.values(), ids=PICKLES)
def test_a_pickle_is_never_executed(
    spoil: Callable[[Malicious, Path], object], run: Path, canary: Path, train_tiny: Train
) -> None:
    """Its SHA-256 is correct: an attacker who writes a checkpoint also writes its checksum."""
    newest = checkpoints.latest(run)
    assert newest is not None
    spoil(Malicious(canary), newest)
    write_sum(newest, contents=newest)
    uses: list[Callable[[], object]] = [
        lambda: protlm.load(run),
        lambda: protlm.load(newest),
        lambda: verify(run),
        lambda: info(run),
        lambda: train_tiny(run, "trainer.max_steps=6"),
    ]
    for use in uses:
        with pytest.raises(UserError, match=newest.name):
            use()
    assert not canary.exists()
    # With the protection off, the canary is created.
    with suppress(RuntimeError):
        torch.load(newest, weights_only=False)
    assert canary.exists()


@pytest.mark.parametrize("name", slow_but(NAMES, "os.system", "protlm.attention.softmax.os"))
def test_a_name_in_a_config_executes_no_other_code(
    name: str, tiny_data: Path, tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "canary.py").write_text(f"open({str(canary)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    attempts = (
        [f"attention.name={name}"],
        [f"+attention._target_={name}", f"+attention.command=touch {canary}"],
        [f"attention={name}"],
        [f"model._target_={name}"],
        [f"+trainer._target_={name}"],
        [f"optimizer.name={name}"],
        [f"trainer.strategy={name}"],
    )
    for overrides in attempts:
        settings = ["model=tiny", f"data.dir={tiny_data}", f"run_dir={tmp_path / 'run'}"]
        with pytest.raises(UserError):
            train(compose(TrainConfig, [*settings, *overrides]))
    with pytest.raises(UserError):
        evaluation.create("mine", {"name": name})
    with pytest.raises(UserError):
        evaluate(compose(EvaluateConfig, ["checkpoint=x", f"evaluation.masked.name={name}"]))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "canary.py"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_checkpoint_executes_no_other_code(
    name: str,
    exported: Path,
    run: Path,
    tmp_path: Path,
    canary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "canary.py").write_text(f"open({str(canary)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = exported / "config.json"
    description = json.loads(config.read_text())
    for section, key in (("attention", "name"), ("attention", "_target_"), ("model", "_target_")):
        wrong = description | {section: description[section] | {key: name}}
        config.write_text(json.dumps(wrong))
        write_sums(exported)
        with pytest.raises(UserError):
            protlm.load(exported)
    newest = checkpoints.latest(run)
    assert newest is not None
    contents = checkpoints.load_training(newest)
    contents[checkpoints.DESCRIPTION]["attention"]["name"] = name
    checkpoints.save_training(contents, newest)
    with pytest.raises(UserError):
        protlm.load(run)
    assert not canary.exists()


def test_a_config_of_a_run_is_data(run: Path, train_tiny: Train, canary: Path) -> None:
    """YAML tags create no objects; interpolations read no variables and run no commands."""
    written = run / "config.yaml"
    before = written.read_text()
    for line in (
        f"seed: !!python/object/apply:os.system ['touch {canary}']",
        "seed: ${oc.env:HOME}",
    ):
        written.write_text(before.replace("seed: 0", line))
        with pytest.raises(UserError):
            train_tiny(run, "trainer.max_steps=6")
    assert not canary.exists()
