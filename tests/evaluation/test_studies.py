"""The evaluations of studies: one run each."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protlm.analysis.replacement import masked_scores
from protlm.analysis.structures import ProteinChoice
from protlm.evaluation.base import NO_SPLIT, Evaluation, ResultTable
from protlm.model.pretrained import PretrainedModel
from studies import attended_pairs
from studies.ablation import Ablation
from studies.annotations import Annotations
from studies.favor_vs_softmax import FavorVsSoftmax
from studies.replaced_attention import favor, with_attention
from studies.similarity import Similarity
from tests.data.test_relatives import random_sequences
from tests.evaluation.test_annotations import entry
from tests.small_models import small_model, structure_folder


def measured(made: Evaluation, model: PretrainedModel) -> tuple[dict[str, Any], ResultTable]:
    values = json.loads(json.dumps(made.run(model, None), allow_nan=False))
    table = made.table({NO_SPLIT: values})
    assert {len(row) for row in table.rows} == {len(table.columns)}
    return values, table


def test_features_are_measured_on_the_proteins_that_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head attends to the third residue, the other to the residue 5 before."""
    model = small_model("performer_relu")
    folder = structure_folder(tmp_path, "test", 3)
    path, (other,) = tmp_path / "x.dat", random_sequences(1, 20)
    sites = "BINDING         3", "DISULFID        6..11"
    path.write_text(
        entry(*sites)
        + entry("SIGNAL          1..4", "SIGNAL          2..?", accession="P00002", sequence=other)
        + entry(*sites, accession="P00003")
        + entry(*sites, accession="P00004").replace("20 AA.", "21 AA.")
    )

    def blocks(model: PretrainedModel, sequence: str) -> list[tuple[int, list[torch.Tensor]]]:
        third = torch.zeros(len(sequence), len(sequence))
        third[:, 2] = 1.0
        before = torch.eye(len(sequence)).roll(-5, dims=1)
        heads = torch.nn.functional.pad(torch.stack([third, before]), (1, 1))
        return [(layer, [heads]) for layer in (1, 2)]

    monkeypatch.setattr(attended_pairs, "residue_rows", blocks)
    made = Annotations(structures=folder, uniprot=str(path))
    with pytest.warns(UserWarning, match="1 of 4 records rejected: 1 length differs"):
        values, _ = measured(made, model)
    length = 20
    assert values["background"]["binding_site"] == pytest.approx(1 / length)
    assert values["background"]["signal_peptide"] == pytest.approx(4 / length)
    assert values["background"]["disulfide_bond"] == pytest.approx(2 / length**2)
    assert values["proteins_with"]["binding_site"] == 1
    assert values["proteins_with"]["contact"] == values["num_proteins"] == 3
    assert "active_site" not in values["background"]
    weighted = {name: np.array(found["weighted"]) for name, found in values["model"].items()}
    assert weighted["binding_site"][0].tolist() == pytest.approx([1, 1 / length])
    assert weighted["signal_peptide"][0].tolist() == pytest.approx([1, 4 / length])
    # Of the 20 weights of the second head, that of residue 11 is on residue 6.
    assert weighted["disulfide_bond"][0].tolist() == pytest.approx([0, 1 / length])
    # A head of one distance finds no more bonds than there are at that distance.
    expected = np.array(values["model"]["disulfide_bond"]["expected"])[0]
    assert expected[1] == pytest.approx(weighted["disulfide_bond"][0, 1])


@pytest.mark.slow
def test_similarity_is_reported_with_intervals(tmp_path: Path) -> None:
    model = small_model("performer_relu")
    made = Similarity(structures=structure_folder(tmp_path, "test", 3))
    values, table = measured(made, model)
    found = values["model"]["weights"]
    assert found["heads"] == model.num_layers * model.num_heads
    assert -1 <= found["pearson"]["low"] <= found["pearson"]["high"] <= 1
    # Maps of linear attention are flat: no pair is above the threshold.
    assert values["model"]["threshold"]["heads"] == 0
    assert len(table.rows) == 6
    assert "too few heads" in table.rows[2][2]


def test_the_ablation_reports_each_head(tmp_path: Path) -> None:
    folders = [structure_folder(tmp_path, part, 2) for part in ("test", "fit")]
    model = small_model("performer_relu")
    made = Ablation(structures=folders[0], fit_structures=folders[1])
    changes = measured(made, model)[0]["changes"]
    assert [(x["layer"], x["head"]) for x in changes] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(x["nats"]["low"] <= x["nats"]["mean"] <= x["nats"]["high"] != 0 for x in changes)


def test_replaced_attention_has_the_reported_costs(tmp_path: Path) -> None:
    model = small_model("softmax")
    folders = {part: structure_folder(tmp_path, part, 2) for part in ("fit", "test")}
    made = FavorVsSoftmax(structures=folders["test"], features=[16, 4096], draws=2)
    made.fit = ProteinChoice(folders["fit"], 10, 400)
    values, table = measured(made, model)
    estimates = values["errors"]["by_estimate"]
    few, many = (np.array(estimates[f"R = {n}"]["output_error"]) for n in (16, 4096))
    assert (many < few).all() and (np.array(estimates["rounded"]["output_error"]) < few).all()
    # Softmax in the place of softmax changes nothing but rounding.
    perplexity = values["perplexity"]
    assert perplexity["softmax"] == pytest.approx(perplexity["own"], rel=1e-5)
    proteins = [protein.sequence for protein in made.proteins.read(model)]
    scored = masked_scores(with_attention(model, favor(model, 16, draw=0), [1, 2]), proteins)
    expected = np.exp(scored.nats.sum() / scored.targets.sum())
    assert perplexity["R = 16"]["all"] == pytest.approx(expected)
    assert len(table.rows) == 2 + 3 * (model.num_layers + 1) + 3
