"""Probes during training: logged and drawn, and without effect on what is learned."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from protlm.analysis.structures import structure_files
from protlm.checkpoints.format import latest
from protlm.checkpoints.validations import METRICS, read_metrics
from protlm.downstream.estimators import Estimator, score
from protlm.downstream.predictions import Predictor
from protlm.downstream.training_probes import AssayProbe, StructureProbe
from protlm.downstream.variants import read_variants
from protlm.loading import load_model
from protlm.model.pretrained import PretrainedModel
from protlm.plots import loss_curve
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import sample_dir

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


@pytest.fixture
def assay(tmp_path: Path) -> tuple[Path, Path]:
    """Substitutions of a protein of eight residues, and the protein."""
    table, wild_type = tmp_path / "assay.csv", tmp_path / "wild_type.fasta"
    rows = ["M1A,0.3", "K2R,0.9", "T3S,0.7", "A4W:Y5P,-2", "I6L,0.5", "K8D,-1", "K8R,"]
    table.write_text("\n".join(["mutant,DMS_score", *rows]) + "\n")
    wild_type.write_text(">P\nMKTAYIAK\n")
    return table, wild_type


def zero_shot(model: PretrainedModel, table: Path, wild_type: Path) -> float:
    """Spearman's correlation of the six measured variants, by another implementation."""
    sequence = wild_type.read_text().split()[1]
    variants = read_variants(table, sequence)
    assert variants.measured is not None
    found = score(Estimator.masked_marginals, Predictor(model), sequence, variants.variants)
    return spearmanr(variants.measured[:6], found.values[:6]).statistic


def test_training_is_bitwise_the_same_with_probes(
    train_tiny: Callable[..., Path],
    tmp_path: Path,
    disturbing: list[int],
    assay: tuple[Path, Path],
) -> None:
    without = weights(train_tiny(tmp_path / "without", *SETTINGS))
    probes = (
        "trainer.probe_every=1",
        f"trainer.probe_assay={assay[0]}",
        f"trainer.probe_wild_type={assay[1]}",
    )
    probed = train_tiny(tmp_path / "with", *SETTINGS, *probes)
    assert len(disturbing) == 4
    again = train_tiny(tmp_path / "resumed", *SETTINGS, *probes, "trainer.max_steps=2")
    again = train_tiny(again, *SETTINGS, *probes, "trainer.max_steps=4")
    for run in (probed, again):
        found = weights(run)
        assert found.keys() == without.keys()
        assert all(torch.equal(found[name], x) for name, x in without.items())
        rows = [row for row in read_metrics(run / METRICS) if "probe_contacts_long" in row]
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert {name: rows[0][name] for name in VALUES} == VALUES
        assert rows[-1]["probe_zero_shot"] == pytest.approx(zero_shot(load_model(run), *assay))
        assert (run / "loss.png").is_file()


def test_the_probe_measures_a_model(tiny_run: Path) -> None:
    probe = StructureProbe(num_fit=2, num_test=2, max_residues=110)
    model = load_model(tiny_run)
    found = probe(model)
    assert tuple(found) == probe.columns
    assert all(0 <= value <= 1 for value in found.values())
    assert probe(model) == found


def test_the_probe_leaves_the_test_structures_of_evaluations_alone() -> None:
    probe = StructureProbe()
    used = [structure.identifier for structure in probe._fit + probe._test]
    assert len(probe._fit) == len(probe._test) == 10 and len(set(used)) == 20
    test = {path.name.split(".")[0] for path in structure_files(sample_dir() / "structures/test")}
    assert test and not test & set(used)


def test_probes_are_drawn_against_the_right_axis() -> None:
    rows = [{"step": n, "train_loss": 3.0 - n, **VALUES} for n in (1.0, 2.0)]
    left, right = loss_curve(rows).axes
    assert right.get_ylabel() == "probes (%)"
    drawn = [np.asarray(line.get_ydata())[0] for line in right.lines]
    assert drawn == [25.0, 12.5, 50.0]
    assert right.get_ylim()[0] == 0
    _, right = loss_curve([{**rows[0], "probe_zero_shot": -0.1}]).axes
    assert right.lines[-1].get_label() == "100 × zero-shot Spearman"
    assert np.asarray(right.lines[-1].get_ydata()).tolist() == [-10.0]
    assert right.get_ylim()[0] < -10
    assert len(loss_curve([{"step": 1.0, "train_loss": 3.0}]).axes) == 1
    assert left.get_ylabel().startswith("loss")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.probe_every=1", "trainer.probe_assay={0}"], "give both"),
        (["trainer.probe_assay={0}", "trainer.probe_wild_type={1}"], "never measured"),
        (
            ["trainer.probe_every=1", "trainer.probe_assay={1}", "trainer.probe_wild_type={1}"],
            "name one of them mutant",
        ),
    ],
)
def test_useless_assays_are_refused_before_training(
    train_tiny: Callable[..., Path],
    tmp_path: Path,
    assay: tuple[Path, Path],
    settings: list[str],
    message: str,
) -> None:
    with pytest.raises((UserError, InputDataError), match=message):
        train_tiny(tmp_path / "run", *(text.format(*assay) for text in settings))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_assays_that_the_model_cannot_score_are_refused(assay: tuple[Path, Path]) -> None:
    table, _ = assay
    with pytest.raises(UserError, match="has a protein of 8 residues, and the model accepts 7"):
        AssayProbe(table, "MKTAYIAK", causal=True, max_residues=7)
    AssayProbe(table, "MKTAYIAK", causal=False, max_residues=7)
    table.write_text("mutated_sequence,DMS_score\nMKTAYIA,1\nAKTAYIAK,2\nMKTAYIAR,3\n")
    with pytest.raises(UserError, match="has insertions or deletions"):
        AssayProbe(table, "MKTAYIAK", causal=False, max_residues=None)
    table.write_text("mutant,DMS_score\nM1A,1\nM1C,2\nM1D,\n")
    with pytest.raises(InputDataError, match="2 variants with a DMS_score"):
        AssayProbe(table, "MKTAYIAK", causal=False, max_residues=None)
