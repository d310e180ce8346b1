"""The average of the weights: its formula and its use."""

from pathlib import Path

import pytest
import torch

from protlm.checkpoints.format import AVERAGE
from protlm.commands.checkpoint import export
from protlm.loading import load_model
from protlm.training.module import LanguageModeling
from tests.fixtures.runs import Train, saved, weights_of

SETTINGS = (
    "trainer.ema_decay=0.5",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=10",
    "trainer.valid_every=2",
)


def average(run: Path, step: int) -> dict[str, torch.Tensor]:
    return saved(run, step)[AVERAGE]


@pytest.fixture(scope="module")
def run(train_tiny: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "averaged", *SETTINGS)


def test_the_average_follows_its_formula(run):
    for step in (2, 3, 4):
        decay = min(0.5, (1 + step) / (10 + step))
        before, after, now = average(run, step - 1), average(run, step), weights_of(run, step)
        for name, value in after.items():
            expected = before[name] + (1 - decay) * (now[name] - before[name])
            assert value.dtype == torch.float32
            assert torch.allclose(value, expected, rtol=1e-5, atol=1e-7), name


def test_the_average_does_not_change_training(run, train):
    plain = train("plain", *SETTINGS[1:])
    for name, value in weights_of(plain, 4).items():
        assert torch.equal(value, weights_of(run, 4)[name]), name
    assert AVERAGE not in saved(plain, 4)


def test_the_average_is_validated(train, look_at):
    seen = []

    def look(module: LanguageModeling, *_: object) -> None:
        seen.append({name: p.clone() for name, p in module.network.named_parameters()})

    look_at(LanguageModeling, "validation_step", look)
    run = train("run", *SETTINGS, "trainer.valid_batches=1")
    for step, found in zip((2, 4), seen, strict=True):
        for name, value in average(run, step).items():
            assert torch.equal(found[name], value), (step, name)


def test_the_average_is_loaded_and_exported(run, tmp_path):
    averaged = average(run, 4)
    loaded = load_model(run).network.state_dict()
    export(run, tmp_path / "exported")
    exported = load_model(tmp_path / "exported").network.state_dict()
    for name, value in averaged.items():
        assert torch.equal(loaded[name], value) and torch.equal(exported[name], value), name
        assert not torch.equal(value, weights_of(run, 4)[name]), name


def test_a_skipped_step_does_not_count(train, monkeypatch):
    train_step, calls = LanguageModeling.training_step, []

    def poisoned(self: LanguageModeling, *args: object) -> dict[str, torch.Tensor]:
        calls.append(1)
        out = train_step(self, *args)
        if len(calls) == 3:
            out["loss"] = out["loss"] * torch.nan
        return out

    monkeypatch.setattr(LanguageModeling, "training_step", poisoned)
    with pytest.warns(UserWarning, match="step 3 was skipped"):
        run = train("run", *SETTINGS)
    for name, value in average(run, 2).items():
        assert torch.equal(value, average(run, 3)[name]), name
    callbacks = saved(run, 4)["callbacks"]
    (state,) = (callbacks[name] for name in callbacks if name.startswith("AverageWeights"))
    assert state["num_updates"] == 3
