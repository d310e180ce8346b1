"""The evaluations of studies: one run each, and what the figures on their pages depend on."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protlm.analysis.replacement import masked_scores
from protlm.analysis.structures import ProteinChoice
from protlm.data.records.swissprot import WRONG_LENGTH
from protlm.data.vocabulary import STANDARD
from protlm.evaluation.base import NO_SPLIT, Evaluation, ResultTable
from protlm.model.pretrained import PretrainedModel
from studies import attended_pairs
from studies.ablation import Ablation
from studies.annotations import Annotations, sign_flip_p_values
from studies.attended_pairs import property_sums, summed
from studies.favor_vs_softmax import FavorVsSoftmax
from studies.replaced_attention import compare_estimates, favor, with_attention
from studies.similarity import Similarity, blosum62, correlation_with_blosum
from tests.data.test_relatives import random_sequences
from tests.evaluation.test_annotations import entry
from tests.small_models import small_model, structure_folder


def measured(made: Evaluation, model: PretrainedModel) -> tuple[dict[str, Any], ResultTable]:
    values = json.loads(json.dumps(made.run(model, None), allow_nan=False))
    table = made.table({NO_SPLIT: values})
    assert {len(row) for row in table.rows} == {len(table.columns)}
    return values, table


def random_map(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 12, 30, generator=generator, dtype=torch.float64).softmax(-1)


def test_measures_are_those_of_a_loop_over_rows() -> None:
    exact, draws = random_map(0), [random_map(1), random_map(2)]
    values = torch.randn(2, 30, 4, dtype=torch.float64)
    found = compare_estimates(exact, draws, values)
    for head in range(2):
        rows = [(a, b) for draw in draws for a, b in zip(exact[head], draw[head], strict=True)]
        kl = [(a * (a / b).log()).sum().item() for a, b in rows]
        variation = [0.5 * (a - b).abs().sum().item() for a, b in rows]
        tops = [
            (set(a.topk(10).indices.tolist()), set(b.topk(10).indices.tolist())) for a, b in rows
        ]
        assert found["kl"][head].item() == pytest.approx(np.median(kl))
        assert found["total_variation"][head].item() == pytest.approx(np.median(variation))
        quantile = np.quantile(variation, 0.95)
        assert found["total_variation_95"][head].item() == pytest.approx(quantile)
        overlap = np.mean([len(a & b) / 10 for a, b in tops])
        assert found["top_overlap"][head].item() == pytest.approx(overlap)
        out = exact[head] @ values[head]
        errors = [((d[head] @ values[head] - out).norm() / out.norm()).item() ** 2 for d in draws]
        assert found["output_error"][head].item() == pytest.approx(np.mean(errors) ** 0.5)


LENGTH = len(PROTEIN := "MKTAYIAKQRQISFVK")


def test_sums_are_those_of_a_loop_over_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("performer_relu")
    generator = np.random.default_rng(0)
    maps = generator.dirichlet(np.full(LENGTH, 0.3), size=(2, 2, LENGTH))

    def blocks(*_: object) -> list[tuple[int, list[torch.Tensor]]]:
        padded = torch.nn.functional.pad(torch.from_numpy(maps), (1, 1))
        return [(n, list(map_HML.split(5, dim=1))) for n, map_HML in enumerate(padded, start=1)]

    monkeypatch.setattr(attended_pairs, "residue_rows", blocks)
    f = generator.random((2, LENGTH, LENGTH)) < 0.3
    known = generator.random((LENGTH, LENGTH)) < 0.8
    found = property_sums(model, PROTEIN, f, known, threshold=0.3)
    pairs = [(i, j) for i in range(LENGTH) for j in range(LENGTH) if known[i, j]]
    for head, a in enumerate(maps.reshape(4, LENGTH, LENGTH)):
        assert found.total[head] == pytest.approx(sum(a[p] for p in pairs))
        assert found.total_arcs[head] == sum(a[p] >= 0.3 for p in pairs)
        for k in range(2):
            assert found.observed[head, k] == pytest.approx(sum(a[p] * f[k][p] for p in pairs))
            assert found.observed_arcs[head, k] == sum(a[p] >= 0.3 and f[k][p] for p in pairs)
            expected = 0.0
            for d in range(LENGTH):
                at = [p for p in pairs if abs(p[0] - p[1]) == d]
                if at:
                    expected += sum(a[p] for p in at) * np.mean([f[k][p] for p in at])
            assert found.expected[head, k] == pytest.approx(expected)
    assert summed([found, found]).total == pytest.approx(2 * found.total)


def test_blosum62_is_in_the_order_of_the_vocabulary() -> None:
    matrix = blosum62()
    assert np.array_equal(matrix, matrix.T)
    for a, b, expected in (("W", "W", 11), ("D", "E", 2), ("F", "Y", 3), ("C", "W", -2)):
        assert matrix[STANDARD.index(a), STANDARD.index(b)] == expected


def planted(sign: float) -> np.ndarray:
    """Fractions of 40 heads whose correlations between amino acids are linear in BLOSUM62."""
    correlations = sign * 0.02 * blosum62()
    np.fill_diagonal(correlations, 1.0)
    factor = np.linalg.cholesky(correlations)
    # Orthonormal vectors over the heads, each of mean 0.
    noise = np.random.default_rng(0).normal(size=(40, 20))
    basis, _ = np.linalg.qr(noise - noise.mean(axis=0))
    return 0.05 + 0.01 * basis @ factor.T


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_constructed_similarity_has_the_known_correlation(sign: float) -> None:
    found = correlation_with_blosum(planted(sign), None)
    assert found["pearson"] == pytest.approx(sign)
    # Rounding breaks the ties of BLOSUM62 at random.
    assert sign * found["spearman"] > 0.9
    # Too few heads have no correlation.
    assert np.isnan(correlation_with_blosum(planted(sign)[:2], None)["pearson"])


def test_division_by_the_background_removes_the_profile_that_heads_share() -> None:
    """Attention in proportion to frequency, more in some heads, makes all amino acids similar."""
    background = np.random.default_rng(1).dirichlet(np.full(20, 5.0))
    shared = np.linspace(0.5, 1.5, 40)[:, None] * background
    confounded = background * (planted(1.0) - 0.05) + 0.1 * shared
    raw = correlation_with_blosum(confounded, None)["pearson"]
    assert correlation_with_blosum(confounded * 7, None)["pearson"] == pytest.approx(raw)
    divided = correlation_with_blosum(confounded, background)["pearson"]
    assert divided > 0.9
    assert raw < divided


def test_corrected_p_values_are_those_of_all_assignments() -> None:
    """Seven proteins have 128 assignments of signs, enumerated here."""
    differences = np.random.default_rng(3).normal(0.5, size=(7, 5, 2))
    signs = np.array(list(product([-1.0, 1.0], repeat=7)))
    t = differences.sum(axis=0) / np.sqrt((differences**2).sum(axis=0))
    for place in range(2):
        flipped = signs @ differences[:, :, place]
        flipped = np.abs(flipped / np.sqrt((differences[:, :, place] ** 2).sum(axis=0)))
        expected = (flipped.max(axis=1)[:, None] >= np.abs(t[:, place]) * (1 - 1e-9)).mean(axis=0)
        found = sign_flip_p_values(differences)[:, place]
        # Five standard deviations of a frequency in 20,000 draws.
        bound = 5 * np.sqrt(expected * (1 - expected) / 20_000) + 1e-4
        assert (np.abs(found - expected) <= bound).all()


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
        values, table = measured(made, model)
    length = 20
    assert values["background"]["binding_site"] == pytest.approx(1 / length)
    assert values["background"]["signal_peptide"] == pytest.approx(4 / length)
    assert values["background"]["disulfide_bond"] == pytest.approx(2 / length**2)
    assert values["proteins_with"]["binding_site"] == 1
    assert values["proteins_with"]["contact"] == values["num_proteins"] == 3
    assert "active_site" not in values["background"]
    assert values["uniprot"] == {
        "num_proteins": 2,
        "proteins_with_features": 3,
        "drawn": 3,
        "relatives_left_out": 1,
        "features_left_out": {"unknown or uncertain position": 1},
        "records_rejected": {WRONG_LENGTH: 1},
    }
    weighted = {name: np.array(found["weighted"]) for name, found in values["model"].items()}
    assert weighted["binding_site"][0].tolist() == pytest.approx([1, 1 / length])
    assert weighted["signal_peptide"][0].tolist() == pytest.approx([1, 4 / length])
    # Of the 20 weights of the second head, that of residue 11 is on residue 6.
    assert weighted["disulfide_bond"][0].tolist() == pytest.approx([0, 1 / length])
    # A head of one distance finds no more bonds than there are at that distance.
    expected = np.array(values["model"]["disulfide_bond"]["expected"])[0]
    assert expected[1] == pytest.approx(weighted["disulfide_bond"][0, 1])
    rows = {row[0]: row for row in table.rows[::2]}
    assert rows["binding_site"][-1] == "1" and rows["helix"][-1] == "3"
    for words in (
        "features left out in the file, unknown or uncertain position: 1",
        f"records rejected in the file, {WRONG_LENGTH}: 1",
        "3 proteins with features in the file: 3 drawn, 1 of them left out as",
    ):
        assert words in table.caption


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
