"""Probes during training: logged and drawn, and without effect on what is learned."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from protlm.build import load_model
from protlm.checkpoints.format import latest
from protlm.checkpoints.metrics import METRICS, read_metrics
from protlm.errors import UserError
from protlm.evaluation.structure_probe import StructureProbe
from protlm.model.pretrained import PretrainedModel
from protlm.plots import loss_curve

VALUES = {
    "probe_contacts_short": 0.25,
    "probe_contacts_long": 0.125,
    "probe_secondary_structure": 0.5,
}
# Dropout draws random numbers in every step.
SETTINGS = ("model.dropout=0.1", "trainer.checkpoint_every=2")


@pytest.fixture
def disturbing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A probe that draws random numbers and runs the model; the list counts its calls."""
    calls: list[int] = []

    def measure(self: StructureProbe, model: PretrainedModel) -> dict[str, float]:
        assert not any(part.training for part in model.network.modules())
        torch.rand(7)
        model(model.tokenize(["MKTAYIAK"]))
        calls.append(1)
        return VALUES

    monkeypatch.setattr(StructureProbe, "__call__", measure)
    return calls


def weights(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = latest(run)
    assert checkpoint is not None
    return torch.load(checkpoint, weights_only=True)["state_dict"]


def test_training_is_bitwise_the_same_with_probes(
    train_tiny: Callable[..., Path], tmp_path: Path, disturbing: list[int]
) -> None:
    without = weights(train_tiny(tmp_path / "without", *SETTINGS))
    probed = train_tiny(tmp_path / "with", *SETTINGS, "trainer.probe_every=1")
    assert len(disturbing) == 4
    again = train_tiny(
        tmp_path / "resumed", *SETTINGS, "trainer.probe_every=1", "trainer.max_steps=2"
    )
    again = train_tiny(again, *SETTINGS, "trainer.probe_every=1", "trainer.max_steps=4")
    for run in (probed, again):
        found = weights(run)
        assert found.keys() == without.keys()
        assert all(torch.equal(found[name], x) for name, x in without.items())
        rows = [row for row in read_metrics(run / METRICS) if "probe_contacts_long" in row]
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert rows[0] == {"step": 1, **VALUES}
        assert (run / "loss.png").is_file()


def test_the_probe_measures_a_model(tiny_run: Path) -> None:
    probe = StructureProbe(num_fit=2, num_test=2, max_residues=110)
    model = load_model(tiny_run)
    found = probe(model)
    assert tuple(found) == probe.columns
    assert all(0 <= value <= 1 for value in found.values())
    assert probe(model) == found


def test_probes_are_drawn_against_the_right_axis() -> None:
    rows = [{"step": n, "train_loss": 3.0 - n, **VALUES} for n in (1.0, 2.0)]
    left, right = loss_curve(rows).axes
    assert right.get_ylabel() == "probes (%)"
    drawn = [np.asarray(line.get_ydata())[0] for line in right.lines]
    assert drawn == [25.0, 12.5, 50.0]
    assert len(loss_curve([{"step": 1.0, "train_loss": 3.0}]).axes) == 1
    assert left.get_ylabel().startswith("loss")


def test_probes_of_sharded_weights_are_refused(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"trainer\.probe_every=1 needs all weights in one process"):
        train_tiny(tmp_path / "run", "trainer.probe_every=1", "trainer.strategy=fsdp")
