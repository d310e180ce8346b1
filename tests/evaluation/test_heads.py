"""Heads: statistics against their definitions, clusters, the evaluation."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protlm.analysis.bootstrap import draws, ratio_interval, ratio_of
from protlm.analysis.head_statistics import MAX_OFFSET, head_statistics, layer_statistics
from protlm.analysis.head_survey import HeadSurvey, head_clusters, head_distances, pool
from protlm.analysis.masked_residues import masked_scores
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError
from tests.rounding import error_bound
from tests.small_models import evaluated, small_model, structure_folder

pytestmark = pytest.mark.usefixtures("checked_shapes")
SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "GSHMLEDPVE", "AVLKKWDERRG"]


def test_a_protein_without_a_pair_has_no_part_in_the_mean_of_a_head() -> None:
    survey = HeadSurvey({}, np.array([[[np.nan, np.nan]], [[1 / 7, 1 / 7]]]))
    assert survey.means()["contact_precision"].tolist() == [[1 / 7] * 2]


def test_pooled_maps_are_means_of_cells() -> None:
    map_HLL = torch.arange(2 * 130 * 130, dtype=torch.float64).view(2, 130, 130)
    found = pool(map_HLL)
    cells = np.arange(130) * 64 // 130
    for head, row, column in ((0, 0, 0), (1, 63, 5), (1, 31, 63)):
        inside = map_HLL[head][cells == row][:, cells == column]
        assert found[head, row, column] == pytest.approx(inside.mean().item())
    np.testing.assert_array_equal(pool(torch.eye(3)[None])[0], np.eye(3))


def test_similar_heads_are_in_one_cluster() -> None:
    generator = np.random.default_rng(0)
    kinds = generator.random((2, 3, 20, 20))

    def protein(number: int) -> np.ndarray:
        noise = generator.random((5, 20, 20)) * 0.1
        return kinds[number, [0, 1, 0, 2, 1]] + noise

    distances = head_distances([protein(0), protein(1)])
    assert np.array_equal(distances, distances.T) and (np.diag(distances) == 0).all()
    assert head_clusters(distances, 3).tolist() == [1, 2, 1, 3, 2]
    assert head_clusters(distances[:1, :1], 3).tolist() == [1]
    constant = head_distances([np.stack([np.ones((4, 4)), kinds[0, 0, :4, :4]])])
    assert constant[0, 1] == 1


def test_ratios_and_their_intervals() -> None:
    found = ratio_interval(np.array([1.0, 3.0]), np.array([2.0, 4.0]))
    assert (found["mean"], found["low"], found["high"], found["count"]) == (4 / 6, 0.5, 0.75, 2)
    assert ratio_interval(np.full(5, 2.0)) == {"mean": 2.0, "low": 2.0, "high": 2.0, "count": 5}


def test_ratios_are_compared_on_the_same_proteins() -> None:
    """One that is better on every protein is so on every draw, where intervals overlap."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(10, 50, 40)
    hits = rng.integers(0, sizes)
    one, other = (ratio_of("F1", hits, x) for x in (sizes, sizes + 5))
    drawn = np.stack([*draws(40, seed=0)])
    assert one.resampled[:, 0] == pytest.approx(hits[drawn].sum(1) / sizes[drawn].sum(1))
    assert (one.less(other, "F1")["low"] or 0) > 0
    assert one.interval("F1")[0] < other.values["F1"]


def test_scores_of_masked_residues() -> None:
    model = small_model("softmax")

    def scores(sequences: list[str] = SEQUENCES, seed: int = 3) -> Any:
        return masked_scores(model, sequences, mask_fraction=0.2, seed=seed)

    found = scores()
    assert found.targets.tolist() == [4, 2, 2]
    np.testing.assert_array_equal(found.nats, scores().nats)
    assert found.nats[0] == scores(SEQUENCES[:1]).nats[0] != scores(SEQUENCES[:1], seed=4).nats[0]


def test_scores_of_next_residues() -> None:
    model = small_model("softmax", "causal")
    found = masked_scores(model, SEQUENCES)
    batch = model.tokenize(SEQUENCES[1:2])
    log_p_LV = model(batch).logits_BLV[0].log_softmax(-1)
    nats = -sum(log_p_LV[i, batch.tokens_BL[0, i + 1]].item() for i in range(len(SEQUENCES[1])))
    assert found.nats[1] == pytest.approx(nats)
    assert found.correct[1] == (log_p_LV.argmax(-1)[:-2] == batch.tokens_BL[0, 1:-1]).sum()
    assert found.targets.tolist() == [len(s) for s in SEQUENCES]


@pytest.mark.slow
def test_the_evaluation_reports_heads_and_contacts(model: PretrainedModel, tmp_path: Path) -> None:
    folders = {
        "structures": structure_folder(tmp_path, "test", 2),
        "fit_structures": structure_folder(tmp_path, "fit", 2),
    }
    values, table = evaluated("heads", model, **folders)
    layers, heads = model.num_layers, model.num_heads
    for who in ("model", "random_weights"):
        assert np.array(values[who]["entropy"]).shape == (layers, heads)
        assert np.array(values[who]["offset_profile"]).shape == (layers, heads, 65)
        assert np.array(values[who]["contact_precision"]).shape == (layers, heads)
        assert set(values[who]["best_head"]["scores"]) == {"short", "medium", "long"}
    assert np.unique(values["clusters"]).tolist() == list(range(1, min(6, layers * heads) + 1))
    assert len(table.rows) == min(16, layers * heads) + 2
    assert "best head alone, model" in table.caption


def test_a_sequence_file_has_statistics_only(model: PretrainedModel, tmp_path: Path) -> None:
    fasta = tmp_path / "x.fasta"
    given = [SEQUENCES[0], "", *SEQUENCES[1:], "M" * 500]
    fasta.write_text("".join(f">P{n}\n{s}\n" for n, s in enumerate(given)))
    with pytest.warns(UserWarning, match="x.fasta: 1 of 5 records rejected"):
        values, table = evaluated("heads", model, sequences=fasta, max_proteins=2)
    assert values["num_proteins"] == 2
    assert "contact_precision" not in values["model"]
    # Offsets that no protein is long enough for are missing.
    assert values["model"]["offset_profile"][0][0][0] is None
    assert "best head" not in table.caption
    fasta.write_text(">P1\n" + "M" * 50)
    with pytest.raises(InputDataError, match="no protein of at most 49 residues"):
        evaluated("heads", model, sequences=fasta, max_residues=49)


PER_ROW = ("entropy", "effective_keys", "mean_distance", "bandwidth", "column_entropy")


def direct(a: np.ndarray) -> dict[str, float]:
    """The statistics of one head, each written from its definition."""
    n = len(a)
    p = a / a.sum(axis=1, keepdims=True)
    entropies = [-sum(x * math.log(x) for x in row if x > 0) for row in p]
    bandwidths = []
    for i, row in enumerate(p):
        within = (sum(row[max(0, i - w) : i + w + 1]) for w in range(n))
        bandwidths.append(next(w for w, mass in enumerate(within) if mass >= 0.8))
    columns = p.mean(axis=0)

    def offset(d: int) -> float:
        return float(np.mean([a[i, i + d] for i in range(n) if 0 <= i + d < n]))

    return {
        "entropy": float(np.mean(entropies)),
        "effective_keys": float(np.mean(np.exp(entropies))),
        "mean_distance": sum(p[i, j] * abs(i - j) for i in range(n) for j in range(n)) / n,
        "bandwidth": float(np.median(bandwidths)),
        "column_entropy": -float((columns * np.log(columns)).sum()),
        "symmetry": float(np.linalg.norm(a - a.T) / np.linalg.norm(a + a.T)),
        "neighbor_mass": offset(1) + offset(-1),
        "strand_mass": offset(2) + offset(-2),
        "helix_mass": offset(3) + offset(-3) + offset(4) + offset(-4),
    }


def test_statistics_of_random_maps_match_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    map_HLL = torch.randn(3, 42, 42, generator=generator, dtype=torch.float64).mul(3).softmax(-1)
    map_HLL = map_HLL[:, 1:-1, 1:-1]
    found = head_statistics(map_HLL)
    for head, map_LL in enumerate(map_HLL.numpy()):
        for name, expected in direct(map_LL).items():
            # Sums of up to L² positive terms.
            bound = error_bound(torch.float64, abs(expected) + 1, 40**2)
            assert abs(found[name][head].item() - expected) <= bound, name
        for d in range(-MAX_OFFSET, MAX_OFFSET + 1):
            expected = np.diagonal(map_LL, d).mean()
            assert found["offset_profile"][head, MAX_OFFSET + d].item() == pytest.approx(expected)


def test_a_causal_map_without_a_diagonal_is_not_symmetric() -> None:
    found = head_statistics(torch.ones(6, 6).tril(-1)[None])
    assert found["symmetry"].item() == 1
    # The first row is empty and does not count.
    assert found["effective_keys"].item() == pytest.approx((1 + 2 + 3 + 4 + 5) / 5)


def test_negative_weights_have_no_entropy() -> None:
    map_HLL = torch.full((2, 4, 4), 0.25)
    map_HLL[1, 2] = torch.tensor([-0.5, 0.5, 0.5, 0.5])
    found = head_statistics(map_HLL)
    for name in PER_ROW:
        assert found[name].isnan().tolist() == [False, True], name
    assert found["symmetry"].isfinite().all()


def test_what_a_protein_is_too_short_for_is_missing() -> None:
    profile = head_statistics(torch.full((1, 3, 3), 1 / 3))["offset_profile"][0]
    assert profile.isfinite().sum() == 5
    assert profile[MAX_OFFSET - 2 : MAX_OFFSET + 3].tolist() == pytest.approx([1 / 3] * 5)


# The rows of Linformer's maps do not sum to 1.
@pytest.mark.parametrize("mechanism", ["performer_relu", "linformer"])
def test_statistics_of_a_model_are_those_of_its_maps(
    mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(mechanism)
    # Maps are computed in several blocks of rows.
    monkeypatch.setattr("protlm.analysis.head_statistics._BLOCK_ENTRIES", 5 * 32 * 2)
    sequence = "MKTAYIAKQRQISFVKSHFSRQLEERLGLI"
    maps = model.attention_maps(model.tokenize([sequence]))
    found = {layer: of_layer for layer, _, of_layer in layer_statistics(model, sequence)}
    assert list(found) == list(maps)
    for layer, map_BHLL in maps.items():
        whole = head_statistics(map_BHLL[0, :, 1:-1, 1:-1])
        sinks_HL = map_BHLL[0, :, 1:-1, [0, -1]].double().sum(dim=-1)
        whole["sink_mass"] = sinks_HL.mean(dim=-1)
        for name, value in whole.items():
            # Blocks of other sizes round differently, in the maps.
            bound = error_bound(torch.float32, 1.0, 64)
            torch.testing.assert_close(
                found[layer][name], value, rtol=bound, atol=bound, equal_nan=True
            )
